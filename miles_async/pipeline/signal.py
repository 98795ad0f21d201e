"""Waiting for shared state to change, inside one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ChangeSignal:
    """Whoever changes what others wait for calls `notify`; the waiters' conditions are then looked at again.

    Looking happens once per turn of the loop, after everything that notified in it is done, and a waiter's task wakes
    only when its condition holds. Cheaper than asyncio.Condition, which takes a lock and wakes everybody: one event
    loop needs neither.
    """

    def __init__(self) -> None:
        self.count = 0
        """Notifications so far."""
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._will_look = False

    def notify(self) -> None:
        self.count += 1
        if self._waiters and not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_soon(self._look)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true; at once if it is already."""
        while not condition():
            woken = asyncio.get_running_loop().create_future()
            self._waiters.append((condition, woken))
            await woken

    async def once(self) -> None:
        """Return after the next notification."""
        seen = self.count
        await self.until(lambda: self.count != seen)

    def _look(self) -> None:
        self._will_look = False
        waiters, self._waiters = self._waiters, []
        for condition, woken in waiters:
            if woken.done():
                continue  # its task was cancelled
            if condition():
                woken.set_result(None)
            else:
                self._waiters.append((condition, woken))
