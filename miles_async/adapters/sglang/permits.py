"""Places at the engines: how many samples may be there at once, and for how long any was."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Permits:
    """`limit` places, given out in order of arrival and several at a time, so that whole groups enter together.

    What is taken beyond a limit that fell meanwhile is given back as it ends.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.limit = limit
        self._queue: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._taken = 0
        self._open = True
        self._busy = 0.0
        self._busy_since = 0.0

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one place was taken."""
        return self._busy + (time.monotonic() - self._busy_since if self._taken else 0.0)

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[bool]:
        """Wait for `count` places (at most `limit`) and hold them; False where the door was closed first."""
        entered = await self._enter(count)
        try:
            yield entered
        finally:
            if entered:
                self._change(-count)
                self._admit()

    def close(self) -> None:
        """Send away who waits and who comes, until `open`."""
        self._open = False
        while self._queue:
            _, turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(False)

    def open(self) -> None:
        self._open = True

    async def _enter(self, count: int) -> bool:
        if not self._open:
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._admit()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():
                self._change(-count)
            self._admit()
            raise

    def _admit(self) -> None:
        while self._queue:
            count, turn = self._queue[0]
            if not turn.done():
                # One that came under a higher limit than there is now enters alone.
                if self._taken + count > self.limit() and self._taken:
                    return
                self._change(count)
                turn.set_result(True)
            self._queue.popleft()

    def _change(self, count: int) -> None:
        now = time.monotonic()
        if self._taken == 0:
            self._busy_since = now
        self._taken += count
        if self._taken == 0:
            self._busy += now - self._busy_since
