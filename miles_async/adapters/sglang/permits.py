"""A fair counting semaphore for samples at the engines: several permits at a time, and a limit that may change."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from miles_async.time_limit import waiting_in_line


class Permits:
    """Grants `limit()` permits in order of arrival, several at a time, so that a whole group enters at once.

    Implements `ports.Requests`.

    When the limit falls, permits above it are not taken away; they are not granted again after their release.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.limit = limit
        self._queue: deque[tuple[int, asyncio.Future[bool]]] = deque()
        """Waiting requests: number of permits, and a future that is set to whether they were granted."""
        self._taken = 0
        self._open = True
        self._busy_seconds = 0.0
        """Length of all periods with permits taken, without the current one."""
        self._busy_since = 0.0

    @property
    def in_flight(self) -> int:
        """Number of permits that are taken."""
        return self._taken

    @property
    def in_line(self) -> int:
        """Number of permits that waiting requests need."""
        return sum(count for count, answer in self._queue if not answer.done())

    @property
    def busy_seconds(self) -> float:
        """Seconds during which at least one permit was taken."""
        return self._busy_seconds + (time.monotonic() - self._busy_since if self._taken else 0.0)

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[bool]:
        """Wait for `count` permits and hold them. Yields False, without permits, if `close` was called before."""
        granted = await self._acquire(count)
        try:
            yield granted
        finally:
            if granted:
                self._change(-count)
                self._grant()

    def close(self) -> None:
        """Refuse all waiting and new requests for permits until `open`."""
        self._open = False
        while self._queue:
            _, answer = self._queue.popleft()
            if not answer.done():
                answer.set_result(False)

    def open(self) -> None:
        self._open = True

    async def _acquire(self, count: int) -> bool:
        if not self._open:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((count, answer))
        self._grant()
        try:
            if answer.done():
                return answer.result()
            with waiting_in_line():
                return await answer
        except asyncio.CancelledError:
            # The permits may have been granted before the waiting task could run.
            if not answer.cancelled() and answer.result():
                self._change(-count)
            self._grant()
            raise

    def _grant(self) -> None:
        """Grant permits to the requests at the head of the queue as long as the limit allows."""
        while self._queue:
            count, answer = self._queue[0]
            if not answer.done():
                # A request for more permits than the current limit is granted when no other permit is taken.
                if self._taken + count > self.limit() and self._taken:
                    return
                self._change(count)
                answer.set_result(True)
            self._queue.popleft()

    def _change(self, count: int) -> None:
        """Add `count`, which may be negative, to the taken permits."""
        now = time.monotonic()
        if self._taken == 0:
            self._busy_since = now
        self._taken += count
        if self._taken == 0:
            self._busy_seconds += now - self._busy_since
