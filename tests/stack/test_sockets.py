"""What listens in a run on one machine: everything on loopback, except Ray, which demands a token."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import state

from miles_async.adapters.sglang.launch import EngineServer, EngineSpec
from miles_async.adapters.weights.engine import call_engine
from miles_async.events import Event, StepEnded
from tests.stack.conftest import Stack
from tests.waiting import PATIENCE_SECONDS

ELSEWHERE = "127.0.0.9"
"""A listener at all addresses accepts connections here, one at 127.0.0.1 does not. No network leads here."""
DROPPED_SECONDS = 0.5
"""A dropped packet is never answered, so a connection attempt only ends by its time limit."""
RAYS_OWN = ("gcs_server", "raylet", "ray/_private/", "ray/dashboard/", "ray/autoscaler/", "ray::IDLE", "ray::Runtime")
"""Words in the command lines of Ray's own processes."""
FOREIGN_CLIENT = "import ray, sys; ray.init(address=sys.argv[1]); print(ray.cluster_resources())"


@pytest.fixture(scope="module")
def listeners(stack: Stack) -> list[tuple[str, str, int]]:
    """Process, address and port of all sockets that listen while a run trains."""
    found: list[tuple[str, str, int]] = []

    def look(event: Event) -> None:
        if isinstance(event, StepEnded) and not found:
            found.extend(_listeners(psutil.Process()))

    stack.play("train_async.py", "--num-rollout", "2", "--rollout-batch-size", "4", "--eval-size", "0", watch=look)
    return found


def test_everything_but_ray_is_reachable_on_loopback_only(listeners: list[tuple[str, str, int]]) -> None:
    of_ray = {actor["Address"]["Port"] for actor in state.actors().values()}
    of_ray |= {entry.laddr.port for entry in psutil.Process().net_connections("tcp")}  # of the driver, this process
    reachable = [
        (process, address, port)
        for process, address, port in listeners
        if not any(words in process for words in RAYS_OWN) and port not in of_ray and _is_reachable(address, port)
    ]
    assert reachable == []
    assert any("sglang" in process for process, _, _ in listeners)


def test_an_engine_at_an_address_of_its_node_is_reachable_there_only(stack: Stack, tmp_path: Path) -> None:
    """A run on several nodes; the ranks of the engine register at that address too."""
    checkpoint = stack.cluster.surroundings.checkpoint
    server = EngineServer(EngineSpec(name="e1", model_path=checkpoint, log_path=tmp_path / "log", host="127.0.0.2"))
    try:
        info = server.start()
        call_engine(info, "/remote_instance_transfer_engine_info?rank=0", timeout=PATIENCE_SECONDS)
        of_engine = [found for found in _listeners(psutil.Process(info.pid)) if found[1] != "127.0.0.2"]
        assert [found for found in of_engine if _is_reachable(*found[1:])] == []
    finally:
        server.stop()


def test_ray_refuses_a_client_without_the_token(stack: Stack) -> None:
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", FOREIGN_CLIENT, address]
    client = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert client.returncode != 0
    assert "token" in client.stderr


def _listeners(parent: psutil.Process) -> Iterator[tuple[str, str, int]]:
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield " ".join(process.cmdline()), connection.laddr.ip, connection.laddr.port


def _is_reachable(address: str, port: int) -> bool:
    """Whether the socket accepts connections that do not go to 127.0.0.1."""
    host = ELSEWHERE if address in ("0.0.0.0", "::") else address
    if host in ("127.0.0.1", "::1"):
        return False
    try:
        socket.create_connection((host, port), timeout=DROPPED_SECONDS).close()
    except OSError:
        return False
    return True
