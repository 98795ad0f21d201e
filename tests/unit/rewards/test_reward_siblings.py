"""Calls of a reward function that are still running when another call of their group fails."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

from miles_async.errors import InfrastructureError, TrajectoryError
from miles_async.rewards.rewarder import Rewarder
from miles_async.types import Group, Sample


def rewarder(function: Any, timeout_seconds: float = 5.0) -> Rewarder:
    return Rewarder(function, args=None, name="my.reward", timeout_seconds=timeout_seconds)


def pair() -> Group:
    return Group([Sample(index=0), Sample(index=1)], feed_index="sample_0_0")


async def test_other_async_calls_of_a_failed_group_have_ended_and_keep_their_rewards() -> None:
    second_runs = asyncio.Event()

    async def reward(args: Any, sample: Sample) -> float:
        if sample.index == 0:
            await second_runs.wait()
            raise RuntimeError("the judge is down")
        second_runs.set()
        await asyncio.sleep(0)
        sample.metadata["ended"] = True
        return 1.0

    group = pair()
    with pytest.raises(TrajectoryError, match="the judge is down"):
        await rewarder(reward).score(group)
    assert group[1].metadata == {"ended": True}
    assert [sample.reward for sample in group] == [None, 1.0]


async def test_async_calls_have_ended_when_the_scoring_of_their_group_is_cancelled() -> None:
    runs, resume = asyncio.Event(), asyncio.Event()

    async def reward(args: Any, sample: Sample) -> float:
        try:
            runs.set()
            await resume.wait()
        finally:
            # A function may await something when it is cancelled.
            await asyncio.sleep(0)
            sample.metadata["ended"] = True
        return 1.0

    group = pair()
    scoring = asyncio.create_task(rewarder(reward).score(group))
    await runs.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert [sample.metadata for sample in group] == [{"ended": True}] * 2


@pytest.mark.virtual_time
async def test_an_async_call_that_ignores_its_cancellation_does_not_outlast_its_time_limit() -> None:
    async def reward(args: Any, sample: Sample) -> float:
        while asyncio.get_running_loop().time() < 1e6:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)
        return 1.0

    async with asyncio.timeout(60.0):
        with pytest.raises(InfrastructureError, match="took longer than 5 s"):
            await rewarder(reward).score(pair())


def test_the_thread_of_a_plain_reward_that_missed_its_deadline_scores_no_further_sample() -> None:
    release, scored = threading.Event(), []

    def reward(args: Any, sample: Sample) -> float:
        scored.append((sample.index, sample.response))
        release.wait(20)
        return 1.0

    async def story() -> None:
        slow = rewarder(reward, timeout_seconds=0.01)
        with pytest.raises(TrajectoryError, match="reward_timeout_seconds"):
            await slow.score(pair())
        await slow.close()

    others = threading.enumerate()
    asyncio.run(story())
    started = [thread for thread in threading.enumerate() if thread not in others]
    release.set()
    for thread in started:
        thread.join(20)
    # On a busy machine the deadline may pass before a thread starts, or before it scores its first sample.
    assert len(scored) == len(set(scored))
