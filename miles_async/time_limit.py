"""A time limit for work that does not count the time in which the work waits in line for a place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

CANCEL_GRACE_SECONDS = 5.0
"""Time that a user's code has to end after it was cancelled."""

innermost_limit: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)
"""The innermost limit of the running code. A task inherits the limits of the code that creates it."""


class TimeLimit:
    """Cancels its block after `seconds` and raises TimeoutError, as `asyncio.timeout` does.

    The limit stands still while code of the block, or a task that was created there, waits in line (`waiting_in_line`):
    that time depends on other work only. Create the limit inside the running event loop.
    """

    def __init__(self, seconds: float | None) -> None:
        self._timeout = asyncio.timeout(seconds)
        self.outer = innermost_limit.get()
        """The limit around this one."""
        self._token: Token[TimeLimit | None]
        self._waiting = 0
        """Number of places that the block waits for now."""
        self._seconds_left: float | None = None
        """The rest of the time while the block waits."""
        self._ended = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._token = innermost_limit.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A task that outlives the block may still be in line.
        self._ended = True
        innermost_limit.reset(self._token)
        await self._timeout.__aexit__(kind, error, traceback)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` under this limit.

        A user's code may ignore its cancellation. Nobody waits for it after CANCEL_GRACE_SECONDS.
        """
        async with self:
            task = asyncio.create_task(_until_exit(work))
            try:
                await asyncio.wait([task])
            finally:
                if task.cancel():
                    await asyncio.wait([task], timeout=CANCEL_GRACE_SECONDS)
            result = task.result()
            if isinstance(result, SystemExit | KeyboardInterrupt):
                raise result
            return result

    def expired(self) -> bool:
        """Whether the limit has cancelled its block."""
        return self._timeout.expired()

    def stop(self) -> None:
        """Stand still until `go_on` was called as often as `stop`."""
        ends = self._timeout.when()
        if not self._waiting and not self._ended and not self.expired() and ends is not None:
            self._seconds_left = ends - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        self._waiting += 1

    def go_on(self) -> None:
        self._waiting -= 1
        if not self._waiting and not self._ended and self._seconds_left is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._seconds_left)
            self._seconds_left = None


async def _until_exit(work: Coroutine[Any, Any, T]) -> T | SystemExit | KeyboardInterrupt:
    """The result of `work`, or an error that would end the event loop if a task raised it."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        return error


@contextmanager
def waiting_in_line() -> Iterator[None]:
    """Wait for a place inside the block: no `TimeLimit` around it counts this time."""
    limits, limit = [], innermost_limit.get()
    while limit is not None:
        limits.append(limit)
        limit = limit.outer
    for limit in limits:
        limit.stop()
    try:
        yield
    finally:
        for limit in limits:
            limit.go_on()


@asynccontextmanager
async def permit(semaphore: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of the permits of `semaphore`; no `TimeLimit` counts the wait for it."""
    with waiting_in_line():
        await semaphore.acquire()
    try:
        yield
    finally:
        semaphore.release()
