"""Calls of a reward function that are still running when their group fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from miles_async.errors import TrajectoryError
from miles_async.rewards.rewarder import Rewarder
from miles_async.types import Group, Sample


def rewarder(function: Any, timeout_seconds: float = 5.0) -> Rewarder:
    return Rewarder(function, args=None, name="my.reward", timeout_seconds=timeout_seconds)


def pair() -> Group:
    return Group([Sample(index=0), Sample(index=1)], feed_index="sample_0_0")


def test_other_async_calls_of_a_failed_group_have_ended_when_the_failure_is_raised() -> None:
    async def story() -> None:
        second_runs, resume = asyncio.Event(), asyncio.Event()

        async def reward(args: Any, sample: Sample) -> float:
            if sample.index == 0:
                await second_runs.wait()
                raise RuntimeError("the judge is down")
            second_runs.set()
            try:
                await resume.wait()
                sample.metadata["written"] = "late"
            finally:
                # A function may await something when it is cancelled.
                await asyncio.sleep(0)
                sample.metadata["ended"] = True
            return 1.0

        group = pair()
        with pytest.raises(TrajectoryError, match="the judge is down"):
            await rewarder(reward).score(group)
        assert group[1].metadata == {"ended": True}
        resume.set()
        await asyncio.sleep(0)
        assert "written" not in group[1].metadata

    asyncio.run(story())


def test_a_plain_reward_that_missed_its_deadline_scores_no_further_sample() -> None:
    release, scored = threading.Event(), []

    def reward(args: Any, sample: Sample) -> float:
        scored.append(sample.index)
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
    # On a busy machine the deadline may pass before the thread starts, or before it scores the first sample.
    assert scored in ([], [0])
