"""Tasks of a run, a signal for shared state that changed, and a lock with a time limit; all inside one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from miles_async.errors import FatalError

T = TypeVar("T")


class TaskSupervisor:
    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that may end; its failure is the run's."""
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def forever(self, name: str, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a loop that ends only by cancellation."""
        return self.spawn(name, _never_returns(name, loop))


async def _never_returns(name: str, loop: Coroutine[Any, Any, None]) -> None:
    await loop
    raise FatalError(f"the {name} loop ended on its own; this is a bug, please report it with the log")


def root_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure itself, out of however many groups it is wrapped in."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


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


class Lease:
    """Of the thing called `what`. Waiting for it is bounded, because holding it is: at most `seconds`."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def held_by(self, owner: str) -> AsyncIterator[None]:
        """Raises Fatal, with the owner's name, where the time is up: the owner is interrupted and the lock is free."""
        async with self._lock:
            limit = asyncio.timeout(self._seconds)
            try:
                async with limit:
                    yield
            except TimeoutError:
                if not limit.expired():
                    raise
                raise FatalError(
                    f"{owner} has held {self._what} for {self._seconds:.0f} s and was interrupted: a learner rank or "
                    "an engine does not answer; the logs of the run say which"
                ) from None
