"""Tasks of a run, a signal for changes of shared state, and a lease with a time limit, inside one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from miles_async.errors import FatalError

T = TypeVar("T")


ABANDONED_AFTER_SECONDS = 60.0
"""A task that has not ended so long after its cancellation is abandoned, so that the run can end."""

log = structlog.get_logger(__name__)


class TaskSupervisor:
    """Owns tasks: one that fails ends the block with its error, and leaving the block ends all of them.

    An `asyncio.TaskGroup` waits for its tasks at the end of the block, without a limit. Here they are cancelled,
    because loops never end. A task that ignores its cancellation, such as a user's function or a call of a disk that
    does not answer, is abandoned, so that it cannot hide the error of the run.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._owner: asyncio.Task[Any]
        """The task that runs the block."""
        self._failure: BaseException | None = None
        """The error of the first task that failed."""
        self._is_leaving = False

    async def __aenter__(self) -> Self:
        owner = asyncio.current_task()
        assert owner is not None, "entered in a coroutine"
        self._owner = owner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A task that failed has cancelled the owner, whom somebody else may have cancelled as well.
        failed = self._failure is not None and not self._owner.uncancel()
        self._is_leaving = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=ABANDONED_AFTER_SECONDS)
            if late:
                log.warning(
                    "the run ends without tasks that ignore their cancellation",
                    tasks=sorted(task.get_name() for task in late),
                    seconds=ABANDONED_AFTER_SECONDS,
                )
        if self._failure is not None and (failed or error is None):
            raise self._failure

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that may return. If it raises, the block ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        if self._is_leaving:
            task.cancel()
        return task

    def forever(self, name: str, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a loop that ends only by cancellation. If it returns, the run ends with FatalError."""
        task = self.spawn(name, _never_returns(name, loop))
        # A task that is cancelled before it begins never awaits the loop.
        task.add_done_callback(lambda _: loop.close())
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (failure := task.exception()) is None or self._failure is not None:
            return
        self._failure = failure
        if not self._is_leaving:
            self._owner.cancel()


async def _never_returns(name: str, loop: Coroutine[Any, Any, None]) -> None:
    await loop
    raise FatalError(f"the {name} loop ended unexpectedly; this is a bug, please report it with the log")


class ChangeSignal:
    """Wakes tasks that wait for a condition on shared state.

    Code that changes the state calls `notify`. The waiters' conditions are then evaluated once per iteration of the
    event loop, after all changes of that iteration, and a task wakes only if its condition holds. This is cheaper than
    `asyncio.Condition`, which takes a lock and wakes every waiter; one event loop needs neither.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of notifications so far."""
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._check_scheduled = False

    def notify(self) -> None:
        """Announce that the state changed."""
        self.count += 1
        if self._waiters and not self._check_scheduled:
            self._check_scheduled = True
            asyncio.get_running_loop().call_soon(self._check_waiters)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true, at once if it is true already."""
        # The loop is needed because another task may change the state between the wake-up and this task's turn.
        while not condition():
            woken = asyncio.get_running_loop().create_future()
            self._waiters.append((condition, woken))
            await woken

    async def next_change(self) -> None:
        """Return after the next notification."""
        seen = self.count
        await self.until(lambda: self.count != seen)

    def _check_waiters(self) -> None:
        self._check_scheduled = False
        waiters, self._waiters = self._waiters, []
        for condition, woken in waiters:
            if woken.done():
                continue  # The waiting task was cancelled.
            if condition():
                woken.set_result(None)
            else:
                self._waiters.append((condition, woken))


class Lease:
    """Exclusive use of `resource` for at most `seconds`. Because each use is limited, waiting for a lease is too."""

    def __init__(self, resource: str, seconds: float) -> None:
        self._resource = resource
        self._seconds = seconds
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def held_by(self, owner: str) -> AsyncIterator[None]:
        """Hold the lease inside the block.

        Raises FatalError that names the owner if the block takes longer than the limit; the block is then cancelled.
        """
        async with self._lock:
            limit = asyncio.timeout(self._seconds)
            try:
                async with limit:
                    yield
            except TimeoutError:
                # A timeout that the block raised itself is the block's own failure.
                if not limit.expired():
                    raise
                raise FatalError(
                    f"{owner} has held {self._resource} for {self._seconds:.0f} s and was interrupted: a learner rank "
                    "or an engine does not answer; look for the cause in the logs of the run"
                ) from None
