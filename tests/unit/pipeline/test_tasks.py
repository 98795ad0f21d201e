"""How the tasks of a run end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from miles_async.errors import FatalError
from miles_async.pipeline.tasks import ABANDONED_AFTER_SECONDS, TaskSupervisor

pytestmark = pytest.mark.virtual_time


async def fail(after: float = 1.0) -> None:
    await asyncio.sleep(after)
    raise FatalError("the disk is full")


async def fail_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise FatalError("the socket was closed")


async def ignore_cancellation(seconds: float) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while (left := end - asyncio.get_running_loop().time()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


async def block(*work: Coroutine[Any, Any, None], body: Awaitable[Any] | None = None) -> list[asyncio.Task[None]]:
    """Run the tasks and the body of a block, which never ends by itself. Returns the tasks."""
    async with TaskSupervisor() as tasks:
        spawned = [tasks.spawn(f"task {number}", coroutine) for number, coroutine in enumerate(work)]
        await (body or asyncio.Event().wait())
    return spawned


async def wait(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("other")


async def test_a_task_that_fails_ends_the_block_and_the_other_tasks() -> None:
    ended: list[str] = []
    async with asyncio.timeout(10.0):
        with pytest.raises(FatalError, match="disk"):
            await block(wait(ended), fail())
    assert ended == ["other"]
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_the_first_error_is_raised() -> None:
    with pytest.raises(FatalError, match="disk"):
        await block(fail_when_cancelled(), fail())


async def test_an_error_of_the_block_is_raised_although_a_task_fails_when_it_is_cancelled() -> None:
    with pytest.raises(FatalError, match="disk"):
        await block(fail_when_cancelled(), body=fail())


async def test_an_error_of_a_task_at_the_end_of_the_block_is_raised() -> None:
    with pytest.raises(FatalError, match="socket"):
        await block(fail_when_cancelled(), body=asyncio.sleep(1.0))


async def test_a_task_that_ignores_its_cancellation_does_not_hide_the_error_of_the_run() -> None:
    with pytest.raises(FatalError, match="disk"):
        await block(ignore_cancellation(1e6), fail())
    assert asyncio.get_running_loop().time() == 1.0 + ABANDONED_AFTER_SECONDS


async def test_tasks_have_time_to_end_after_their_cancellation() -> None:
    [slow] = await block(ignore_cancellation(10.0), body=asyncio.sleep(1.0))
    assert slow.done()
    assert asyncio.get_running_loop().time() == 10.0


async def test_a_cancellation_from_outside_ends_the_block_and_its_tasks() -> None:
    ended: list[str] = []
    running = asyncio.create_task(block(wait(ended)))
    await asyncio.sleep(1.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["other"]


async def test_a_task_that_begins_while_the_others_end_is_cancelled() -> None:
    late: list[asyncio.Task[None]] = []

    async def starts_another() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            late.append(tasks.spawn("late", asyncio.sleep(1e6)))

    async with TaskSupervisor() as tasks:
        tasks.spawn("first", starts_another())
        await asyncio.sleep(1.0)
    await asyncio.sleep(0)
    assert late[0].cancelled()


async def test_a_loop_that_ends_is_an_error_of_the_run() -> None:
    async def run() -> None:
        async with TaskSupervisor() as tasks:
            tasks.forever("journal", asyncio.sleep(1.0))
            await asyncio.Event().wait()

    with pytest.raises(FatalError, match="the journal loop ended"):
        await run()
