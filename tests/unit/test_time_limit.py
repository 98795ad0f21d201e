"""Time limits of work that also waits in line."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from miles_async.adapters.sglang.permits import Permits
from miles_async.rewards.grader_pool import GraderPool, UnavailableError
from miles_async.rewards.rewarder import Rewarder
from miles_async.time_limit import CANCEL_GRACE_SECONDS, TimeLimit, permit, waiting_in_line
from miles_async.types import Group, Sample, SampleStatus

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def in_line(seconds: float) -> None:
    with waiting_in_line():
        await asyncio.sleep(seconds)


async def test_work_that_takes_too_long_is_cancelled() -> None:
    limit = TimeLimit(10.0)
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.sleep(11.0)
    assert limit.expired()
    assert now() == 10.0


async def test_work_without_a_limit_may_take_any_time() -> None:
    async with TimeLimit(None):
        await in_line(1e6)
        await asyncio.sleep(1e6)


async def test_time_in_line_does_not_count() -> None:
    async with TimeLimit(10.0) as limit:
        for _ in range(3):
            await asyncio.sleep(3.0)
            await in_line(1_000.0)
    assert not limit.expired()


async def test_the_limit_goes_on_after_the_line_with_the_time_that_was_left() -> None:
    async def work() -> None:
        await asyncio.sleep(4.0)
        await in_line(1_000.0)
        await asyncio.sleep(1_000.0)

    with pytest.raises(TimeoutError):
        async with TimeLimit(10.0):
            await work()
    assert now() == 1_010.0


async def test_the_limit_stands_still_until_the_last_of_several_requests_has_its_place() -> None:
    with pytest.raises(TimeoutError):
        async with TimeLimit(10.0):
            await asyncio.gather(in_line(20.0), in_line(50.0), asyncio.sleep(1_000.0))
    assert now() == 60.0


async def test_all_limits_around_a_line_stand_still() -> None:
    async with TimeLimit(10.0), TimeLimit(5.0):
        await in_line(1_000.0)


async def test_a_line_outside_of_the_block_does_not_extend_the_limit() -> None:
    other = asyncio.create_task(in_line(1_000.0))
    with pytest.raises(TimeoutError):
        async with TimeLimit(10.0):
            await other
    assert now() == 10.0


async def test_a_task_that_outlives_the_block_may_still_wait_in_line() -> None:
    async with TimeLimit(10.0):
        left = asyncio.create_task(in_line(20.0))
        await asyncio.sleep(1.0)
    await left
    late = asyncio.create_task(in_line(1.0))
    await late


async def test_work_that_is_cancelled_in_line_leaves_the_line() -> None:
    semaphore = asyncio.Semaphore(1)
    async with TimeLimit(10.0), permit(semaphore):
        waiting = asyncio.create_task(permit(semaphore).__aenter__())
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
    async with TimeLimit(10.0), permit(semaphore):
        pass


async def test_the_wait_for_places_at_the_engines_does_not_count() -> None:
    permits = Permits(lambda: 1)

    async def request(seconds: float) -> None:
        async with permits.take(1):
            await asyncio.sleep(seconds)

    busy = asyncio.create_task(request(1_000.0))
    await asyncio.sleep(0.0)
    async with TimeLimit(10.0):
        await request(9.0)
    with pytest.raises(TimeoutError):
        async with TimeLimit(10.0):
            await request(11.0)
    await busy


async def test_the_wait_for_a_grader_process_does_not_count() -> None:
    graders = GraderPool(path="none.at_all", setting="custom_rm_path", args={}, processes=1, timeout_seconds=1.0)
    await graders._permits.acquire()
    asyncio.get_running_loop().call_later(1_000.0, graders._permits.release)
    results: list[Any] = []

    async def unavailable() -> Any:
        raise UnavailableError("no process")

    graders._start = unavailable  # type: ignore[method-assign]
    async with TimeLimit(10.0):
        results = await graders.grade([Sample(index=0)])
    assert [str(result) for result in results] == ["no process"]
    assert now() == 1_000.0


@pytest.mark.parametrize("whole_groups", [False, True])
async def test_the_time_limit_of_a_reward_does_not_count_its_time_in_line(whole_groups: bool) -> None:
    async def judged_by_a_model(args: Any, samples: Any) -> Any:
        await in_line(1_000.0)
        await asyncio.sleep(50.0)
        return [1.0] * len(samples) if whole_groups else 1.0

    rewarder = Rewarder(
        judged_by_a_model, None, name="judge", timeout_seconds=60.0, whole_groups=whole_groups, reward_key=None
    )
    group = Group([Sample(index=index, status=SampleStatus.COMPLETED) for index in range(2)])
    await rewarder.score(group)
    assert group.rewards == [1.0, 1.0]
    await rewarder.close()


async def test_work_that_ignores_its_cancellation_is_abandoned() -> None:
    async def work() -> None:
        while now() < 1e6:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)

    limit = TimeLimit(10.0)
    with pytest.raises(TimeoutError):
        await limit.run(work())
    assert limit.expired()
    assert now() == 10.0 + CANCEL_GRACE_SECONDS
