"""The router comes back at its previous address, even if the process that owned it was killed with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.adapters.sglang.process import ServerProcess
from miles_async.adapters.sglang.router import RouterServer, RouterSpec
from miles_async.adapters.system.network_ports import ClaimedPort, claim_port
from miles_async.errors import FatalError


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers start without a process."""
    monkeypatch.setattr(ServerProcess, "start", lambda *arguments: None)


@pytest.fixture
def url() -> str:
    port = claim_port()
    port.release()
    return f"http://127.0.0.1:{port.number}"


def test_a_new_owner_starts_the_router_at_its_previous_address(tmp_path: Path, url: str) -> None:
    server = RouterServer(RouterSpec(log_path=tmp_path / "router.log"))
    assert server.restart(url) == url
    server.stop()


def test_a_router_with_a_port_starts_there_or_says_that_the_port_is_taken(tmp_path: Path, url: str) -> None:
    port = int(url.rpartition(":")[2])
    server = RouterServer(RouterSpec(log_path=tmp_path / "router.log", port=port))
    assert server.start() == url
    other = RouterServer(RouterSpec(log_path=tmp_path / "other.log", port=port))
    with pytest.raises(FatalError, match=f"sglang_router_port {port} is not available .* set it to a free port"):
        other.start()
    server.stop()


def test_the_same_owner_starts_the_router_at_its_previous_address(tmp_path: Path) -> None:
    server = RouterServer(RouterSpec(log_path=tmp_path / "router.log"))
    started = server.start()
    assert server.restart(started) == started
    server.stop()


def test_a_port_that_the_old_owner_still_holds_is_an_error_that_a_later_restart_overcomes(
    tmp_path: Path, url: str
) -> None:
    server = RouterServer(RouterSpec(log_path=tmp_path / "router.log"))
    old_owner = ClaimedPort(int(url.rpartition(":")[2]))
    with pytest.raises(FatalError, match="previous port"):
        server.restart(url)
    old_owner.release()
    assert server.restart(url) == url
    server.stop()
