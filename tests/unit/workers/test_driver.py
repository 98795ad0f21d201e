"""The driver while the run does not answer, and at the end of a run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError
from miles_async.events import RunEnded
from miles_async.observability.run_folder import RunFolder
from tests.configuration import run_config
from workers import driver
from workers.driver import StopRequest


class Hung:
    """A cluster whose rollout worker never answers a call."""

    probes: dict[str, Any] = {}

    def __init__(self) -> None:
        self.rollout = self
        self.asked_to_stop = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    events = run

    def stop(self) -> None:
        self.asked_to_stop += 1


class Summary:
    """Records the end that the early summary reports."""

    reason = ""

    def write_summary(self, end: RunEnded) -> None:
        self.reason = end.reason


class Watchdog:
    """Gives the run up at the third look."""

    looks = 0

    def look(self, now: float) -> None:
        self.looks += 1
        if self.looks == 3:
            raise FatalError("the rollout worker has not answered")


async def test_a_run_that_hangs_after_ctrl_c_is_still_monitored_and_then_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "TICK_SECONDS", 0.0)
    hung: Any = Hung()
    subscribers: Any = Summary()
    stop = StopRequest(subscribers, 8.0)
    stop.request(signal.SIGINT)
    watchdog: Any = Watchdog()
    with pytest.raises(FatalError, match="has not answered"):
        await driver._follow(hung, subscribers, watchdog, stop, RunConfig)
    assert hung.asked_to_stop == 1


class Ended:
    """A cluster whose run has ended, and whose last event is in the answer to a pending call."""

    probes: dict[str, Any] = {}

    def __init__(self) -> None:
        self.rollout = self
        self.answers = [["the last event"], []]

    async def run(self) -> None: ...

    async def events(self) -> list[str]:
        answer = self.answers.pop(0)
        await asyncio.sleep(0.01)
        return answer


async def test_the_last_event_of_a_run_is_emitted() -> None:
    emitted: list[str] = []

    class EventSubscribers:
        def emit(self, *events: str) -> None:
            emitted.extend(events)

    ended: Any = Ended()
    subscribers: Any = EventSubscribers()
    watchdog: Any = Watchdog()
    await driver._follow(ended, subscribers, watchdog, StopRequest(subscribers, 8.0), RunConfig)
    assert emitted == ["the last event"]


async def test_subscribers_are_updated_while_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TICK_SECONDS", 0.0)
    updated = asyncio.Event()

    class EventSubscribers:
        def tick(self, now: float) -> None:
            updated.set()

    subscribers: Any = EventSubscribers()
    await driver._guard(updated.wait(), driver._tick(subscribers))


async def test_a_run_that_has_ended_keeps_only_the_newest_version_of_each_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What engines could load while it went on may be as large as the model, or several times an adapter."""
    config = run_config(run_dir=str(tmp_path))
    folder = RunFolder.create(config)

    class Cluster:
        def __init__(self, *_: Any) -> None: ...

        async def __aenter__(self) -> None:
            for written in ("weights/source_0", "adapters/v9", "adapters/v10", "adapters/one/v8", "adapters/two/v7"):
                (folder.path / written).mkdir(parents=True)
            raise FatalError("the learner is lost")

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setitem(sys.modules, "workers.cluster", SimpleNamespace(Cluster=Cluster))
    checked: Any = SimpleNamespace(beginning=SimpleNamespace(folder=None))
    with pytest.raises(FatalError, match="the learner is lost"):
        await driver._drive(config, [], folder, "train_async.py", checked, "model", 0)
    left = {str(path.relative_to(folder.path)) for path in (folder.path / "adapters").rglob("v*")}
    assert left == {"adapters/v10", "adapters/one/v8", "adapters/two/v7"}
    assert not (folder.path / "weights").exists()
    folder.reopen(config)
    assert not (folder.path / "adapters").exists(), "engines of a continued run load only what it publishes"


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_process_that_cannot_disconnect_from_ray_exits_without_its_native_code(
    monkeypatch: pytest.MonkeyPatch, is_connected: bool
) -> None:
    def exit_at_once(code: int) -> None:
        raise SystemExit(f"at once with {code}")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: is_connected))
    monkeypatch.setattr(os, "_exit", exit_at_once)
    with pytest.raises(SystemExit) as ended:
        driver.leave(3)
    assert ended.value.code == ("at once with 3" if is_connected else 3)
