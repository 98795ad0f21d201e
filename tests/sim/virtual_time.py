"""An asyncio event loop whose clock jumps to the next timer: a run of hours takes as long as its own computation."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits and no timer is set: in real time this run would hang for good."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a file, moves the clock to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("every task waits for another and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def stop_process(self, seconds: float) -> None:
        """Let time pass while nothing runs, as after SIGSTOP."""
        self._virtual.now += seconds


class VirtualClock:
    """The `Clock` port on virtual time. Create it inside the running loop."""

    def __init__(self) -> None:
        self.monotonic = asyncio.get_running_loop().time
        self._wall_offset = 0.0

    def time(self) -> float:
        return self.monotonic() + self._wall_offset

    def step_wall_clock(self, seconds: float) -> None:
        """Set the wall clock forward or back, as NTP does."""
        self._wall_offset += seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
