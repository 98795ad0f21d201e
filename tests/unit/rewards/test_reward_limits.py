"""Responses whose reward does not end: they count as wrong, unless the reward ends for no response at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from miles_async.errors import InfrastructureError, TrajectoryError
from miles_async.rewards.grader_pool import GraderPool
from miles_async.rewards.rewarder import Rewarder
from miles_async.rewards.threads import _Series
from miles_async.types import REWARD_ERROR, Group, Sample

HANGS = "9^{9^{9^9}}"


def group_of(*responses: str) -> Group:
    return Group([Sample(index=i, response=text) for i, text in enumerate(responses)], feed_index="sample_0_0")


class Computer:
    """A plain reward that never ends for some responses. Only they miss the deadline, however slow the machine is."""

    def __init__(self) -> None:
        self.hangs = {HANGS}
        self.release = threading.Event()

    def __call__(self, args: Any, sample: Sample) -> float:
        if sample.response in self.hangs:
            self.release.wait(60)
        return 1.0

    def seconds_left(self, series: _Series, timeout_seconds: float | None) -> float:
        return 0.0 if series._samples[len(series._results)].response in self.hangs else 0.01


@pytest.fixture
def computes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computer]:
    computer = Computer()
    monkeypatch.setattr(_Series, "seconds_left", lambda series, limit: computer.seconds_left(series, limit))
    yield computer
    computer.release.set()


def limited(function: Any, **options: Any) -> Rewarder:
    return Rewarder(function, None, name="my.reward", timeout_seconds=0.05, **options)


async def test_a_response_that_takes_too_long_counts_as_wrong_and_the_others_keep_their_rewards(
    computes: Computer,
) -> None:
    group = group_of("4", HANGS, "5")
    with capture_logs() as lines:
        await limited(computes).score(group)
    assert [sample.reward for sample in group] == [1.0, 0.0, 1.0]
    [said] = group.unfinished_rewards
    assert said == "sample 1: reward my.reward took longer than 0.05 s (reward_timeout_seconds)"
    assert [line["sample"] for line in lines] == [1]


async def test_a_wrong_reward_has_the_form_of_the_others(computes: Computer) -> None:
    def reward(args: Any, sample: Sample) -> dict[str, float]:
        return {"score": computes(args, sample), "acc": 1.0}

    group = group_of("4", HANGS)
    await limited(reward, reward_key="score", wrong={"score": -1.0, "acc": 0.0}).score(group)
    assert [sample.reward for sample in group] == [{"score": 1.0, "acc": 1.0}, {"score": -1.0, "acc": 0.0}]
    assert [sample.scalar_reward for sample in group] == [1.0, -1.0]


async def test_a_group_of_responses_that_all_take_too_long_counts_as_wrong_if_the_reward_still_works(
    computes: Computer,
) -> None:
    rewarder = limited(computes)
    await rewarder.score(group_of("4"))
    group = group_of(HANGS, HANGS)
    await rewarder.score(group)
    assert [sample.reward for sample in group] == [0.0, 0.0]


async def test_a_reward_that_ends_for_no_response_is_infrastructure(computes: Computer) -> None:
    rewarder = limited(computes)
    await rewarder.score(group_of("1"))
    computes.hangs = {"1", "2", "3"}
    group = group_of("2", "3")
    with pytest.raises(InfrastructureError, match="it finishes for no other response either") as raised:
        await rewarder.score(group)
    assert raised.value.samples == list(group)
    assert [sample.reward for sample in group] == [None, None]
    assert group.unfinished_rewards == []


async def test_the_first_group_of_a_run_counts_as_wrong_if_the_reward_ends_for_a_short_response(
    computes: Computer,
) -> None:
    group = group_of(HANGS, HANGS)
    await limited(computes).score(group)
    assert [sample.reward for sample in group] == [0.0, 0.0]


async def test_a_reward_that_has_never_ended_is_infrastructure(computes: Computer) -> None:
    computes.hangs.add("0")
    with pytest.raises(InfrastructureError, match=r"sample 0: reward my\.reward took longer than 0\.05 s"):
        await limited(computes).score(group_of(HANGS))


async def test_the_deadline_is_that_of_a_sample_and_not_of_its_group(computes: Computer) -> None:
    group = group_of("4", HANGS, HANGS, "5", HANGS, "6")
    await limited(computes).score(group)
    assert [sample.reward for sample in group] == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


async def test_a_reward_that_is_scored_again_is_no_longer_marked() -> None:
    group = group_of("4")
    group[0].metadata[REWARD_ERROR] = "sample 0: it took too long"
    await limited(lambda args, sample: 1.0).score(group)
    assert group.unfinished_rewards == []


async def test_a_prompt_that_is_generated_again_is_no_longer_marked() -> None:
    """The generate function may set the next reward, and the prompt may be stored before."""
    [sample] = group = group_of(HANGS)
    sample.metadata = {"level": 3, REWARD_ERROR: "sample 0: it took too long"}
    assert sample.prompt_dict()["metadata"] == {"level": 3}
    group.reset()
    assert sample.metadata == {"level": 3}


async def test_a_plain_reward_of_a_whole_group_that_takes_too_long_fails_the_group() -> None:
    release = threading.Event()
    try:
        with pytest.raises(TrajectoryError, match=r"group sample_0_0: reward my\.reward took longer") as raised:
            await limited(lambda args, samples: release.wait(60), whole_groups=True).score(group_of("4", "5"))
        assert not isinstance(raised.value, InfrastructureError)
        assert raised.value.samples == ()
    finally:
        release.set()


async def test_an_async_reward_of_a_whole_group_that_takes_too_long_is_infrastructure() -> None:
    async def waits(args: Any, samples: list[Sample]) -> list[float]:
        await asyncio.Event().wait()
        return []

    group = group_of("4", "5")
    with pytest.raises(InfrastructureError, match="took longer") as raised:
        await limited(waits, whole_groups=True).score(group)
    assert raised.value.samples == list(group)


class Recording(GraderPool):
    """Grader processes that give 1 to every response, without processes."""

    seen: list[str]

    async def grade(self, samples: Sequence[Sample]) -> list[Any]:
        self.seen = [sample.response for sample in samples]
        return [1.0] * len(samples)


async def test_grader_processes_score_only_the_samples_without_a_reward() -> None:
    graders = Recording("my.reward", "rm_type", {}, processes=1, timeout_seconds=60.0)
    group = group_of("scored by the generate function", "4")
    group[0].reward = 0.25
    await Rewarder(graders, None, name="math", timeout_seconds=None).score(group)
    assert graders.seen == ["4"]
    assert [sample.reward for sample in group] == [0.25, 1.0]


async def test_the_samples_that_only_infrastructure_has_failed_are_not_generated_again() -> None:
    async def reward(args: Any, sample: Sample) -> float:
        if sample.index == 0:
            raise ConnectionError("the judge is down")
        if sample.index == 1:
            raise KeyError("answer")
        return 1.0

    group = group_of("a", "b", "c")
    with pytest.raises(TrajectoryError, match=r"sample 1: reward my\.reward raised KeyError") as raised:
        await limited(reward).score(group)
    assert raised.value.samples == [group[1]]
    assert [sample.reward for sample in group] == [None, None, 1.0]
