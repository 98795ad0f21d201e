"""The tasks of a run, each with a name, none forgotten.

The body of `async with TaskSupervisor()` is the finite clock: when it ends, whatever still runs is cancelled. A failure anywhere
ends everything else and comes out as itself, not as a group of exceptions. A loop that returns on its own is a failure
too: a producer that ends cleanly would leave the trainer waiting for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
