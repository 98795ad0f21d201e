"""Everything in a run on one machine listens on loopback only, except Ray, which demands a token."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
import ray
from ray._private import state

from miles_async.events import Event, StepEnded
from tests.stack.conftest import Stack
from tests.stack.listeners import Listener, is_reachable, listeners_of
from tests.waiting import START_SECONDS

RAYS_OWN = ("gcs_server", "raylet", "ray/_private/", "ray/dashboard/", "ray/autoscaler/", "ray::IDLE", "ray::Runtime")
"""Words in the command lines of Ray's own processes."""
FOREIGN_CLIENT = "import ray, sys; ray.init(address=sys.argv[1]); print(ray.cluster_resources())"


@pytest.fixture(scope="module")
def listeners(stack: Stack) -> list[Listener]:
    """All sockets that listen while a run trains."""
    found: list[Listener] = []

    def look(event: Event) -> None:
        if isinstance(event, StepEnded) and not found:
            found.extend(listeners_of(psutil.Process()))

    stack.play("train_async.py", "--num-rollout", "2", "--rollout-batch-size", "4", "--eval-size", "0", watch=look)
    return found


def test_everything_but_ray_is_reachable_on_loopback_only(listeners: list[Listener]) -> None:
    of_ray = {actor["Address"]["Port"] for actor in state.actors().values()}
    of_ray |= {entry.laddr.port for entry in psutil.Process().net_connections("tcp")}  # of the driver, this process
    reachable = [
        listener
        for listener in listeners
        if not any(words in listener.process for words in RAYS_OWN)
        and listener.port not in of_ray
        and is_reachable(listener)
    ]
    assert reachable == []
    assert any("sglang" in listener.process for listener in listeners)


def test_ray_refuses_a_client_without_the_token(stack: Stack) -> None:
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", FOREIGN_CLIENT, address]
    client = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS)
    assert client.returncode != 0
    assert "token" in client.stderr
