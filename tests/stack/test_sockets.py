"""Everything in a run on one machine listens on loopback only, except Ray, which demands a token that others lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import state

from miles_async.adapters.ray.private_files import LONGEST_ADDRESS
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


AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
"""The beginning of a command that another user of the machine runs."""


def as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AS_NOBODY, *command], capture_output=True, text=True, timeout=START_SECONDS)


@pytest.fixture
def folder_of_ray(stack: Stack) -> Path:
    session = ray.get_runtime_context()
    return Path(session.get_temp_dir()) / session.get_session_name()


only_root_becomes_nobody = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@only_root_becomes_nobody
@pytest.mark.parametrize("below", ["sockets", "logs", ""], ids=["sockets", "logs", "the session"])
def test_another_user_sees_nothing_in_the_folder_of_ray(folder_of_ray: Path, below: str) -> None:
    assert (folder_of_ray / below).is_dir()
    assert as_nobody("ls", str(folder_of_ray / below)).returncode != 0


@only_root_becomes_nobody
def test_another_user_cannot_replace_a_socket_of_ray(folder_of_ray: Path) -> None:
    socket = folder_of_ray / "sockets" / "plasma_store"
    assert socket.is_socket()
    assert as_nobody("mv", str(socket), f"{socket}.stolen").returncode != 0
    assert as_nobody("mv", str(folder_of_ray), f"{folder_of_ray}.stolen").returncode != 0
    assert socket.is_socket()


@only_root_becomes_nobody
def test_another_user_cannot_read_the_token_of_ray(stack: Stack) -> None:
    token = Path.home() / ".ray" / "auth_token"
    assert as_nobody("cat", str(token)).returncode != 0
    # Also where the home folder itself is open to others.
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_sockets_of_ray_have_room_in_their_addresses(folder_of_ray: Path) -> None:
    assert max(len(bytes(path)) for path in (folder_of_ray / "sockets").iterdir()) <= LONGEST_ADDRESS
