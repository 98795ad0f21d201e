"""The process that the user started, while the run beneath it does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_async.errors import Fatal
from workers import driver


class Hung:
    """A cluster whose rollout worker takes calls and answers none."""

    questions: dict[str, Any] = {}

    def __init__(self) -> None:
        self.asked_to_stop = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    events = run

    def stop(self) -> None:
        self.asked_to_stop += 1


class Watchdog:
    """Gives the run up at the third look."""

    looks = 0

    def look(self, now: float) -> None:
        self.looks += 1
        if self.looks == 3:
            raise Fatal("the rollout worker has not answered")


def test_a_run_that_hangs_when_ctrl_c_is_pressed_is_watched_on_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TICK_SECONDS", 0.0)
    hung: Any = Hung()

    async def follow() -> None:
        stop = asyncio.Event()
        stop.set()
        nobody: Any = None
        watchdog: Any = Watchdog()
        await driver._follow(hung, nobody, watchdog, stop, "train_async.py")

    with pytest.raises(Fatal, match="has not answered"):
        asyncio.run(follow())
    assert hung.asked_to_stop == 1
