"""Waiting for shared state to change, inside one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changed:
    """Whoever changes what others wait for calls `notify`; waiters look again.

    Cheaper than asyncio.Condition, which takes a lock: one event loop needs none.
    """

    def __init__(self) -> None:
        self.count = 0
        """Notifications so far."""
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        self.count += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true; at once if it is already."""
        while not condition():
            await self.once()

    async def once(self) -> None:
        """Return at the next notification."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
