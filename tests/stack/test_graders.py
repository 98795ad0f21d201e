"""Rewards in separate processes: a reward that hangs is ended, and one that dies fails its sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.fields import values_of
from miles_async.config.schema import RunConfig
from miles_async.errors import InfrastructureError, TrajectoryError
from miles_async.rewards import mathematics
from miles_async.rewards.factory import RunRewards
from miles_async.rewards.grader_pool import GraderPool, UnavailableError, UnfinishedError
from miles_async.rewards.instructions import follows
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.scoring import scored

REWARDS = "tests.stack.isolated_rewards"
ISOLATED: dict[str, Any] = {"custom_rm_isolated": True, "reward_timeout_seconds": 60.0}


async def test_an_isolated_reward_scores_a_group_in_one_call() -> None:
    assert await scored("a", "b", custom_rm_path=f"{REWARDS}.positions", group_rm=True, **ISOLATED) == [0.0, 1.0]


async def test_an_isolated_reward_runs_in_another_process_and_sees_the_settings() -> None:
    path = f"{REWARDS}.length"
    assert await scored("ab", "", custom_rm_path=path, n_samples_per_prompt=4, **ISOLATED) == [6.0, 4.0]


@asynccontextmanager
async def graders(name: str, **options: Any) -> AsyncIterator[GraderPool]:
    limits = {"processes": 1, "timeout_seconds": 60.0} | options
    pool = GraderPool(f"{REWARDS}.{name}", "custom_rm_path", values_of(RunConfig()), **limits)
    try:
        yield pool
    finally:
        await pool.close()


async def test_an_isolated_reward_that_hangs_is_ended_at_its_deadline_and_the_other_samples_are_scored() -> None:
    async with graders("hangs", timeout_seconds=1.0) as pool:
        first, hung, last = await pool.grade([Sample(response=text) for text in ("fine", "hang", "fine")])
        assert (first, last) == (1.0, 1.0)
        assert isinstance(hung, UnfinishedError)
        assert str(hung) == "took longer than 1 s (reward_timeout_seconds); its process was killed"


async def test_an_isolated_reward_whose_process_is_killed_for_a_sample_again_and_again_has_crashed() -> None:
    async with graders("kills_itself") as pool:
        fine, crashed = await pool.grade([Sample(response="fine"), Sample(response="crash")])
        assert fine == 1.0
        assert isinstance(crashed, UnfinishedError)
        assert str(crashed) == "ended its process by signal 9"


async def test_a_sample_whose_process_is_killed_once_is_scored_again(tmp_path: Path) -> None:
    async with graders("is_killed_once") as pool:
        assert await pool.grade([Sample(response=str(tmp_path / "killed"))]) == [1.0]
    assert (tmp_path / "killed").exists()


async def test_an_isolated_reward_that_ends_its_process_fails_its_sample() -> None:
    with pytest.raises(TrajectoryError, match=r"sample 0: reward .*\.exits ended its process with exit code 3"):
        await scored("x", custom_rm_path=f"{REWARDS}.exits", **ISOLATED)


async def test_what_a_reward_writes_to_the_pipe_of_its_process_is_no_answer_to_a_later_request() -> None:
    async with graders("answers_the_next_request") as pool:
        await pool.grade([Sample(response="forge")])
        assert [await pool.grade([Sample(response="honest")]) for _ in range(4)] == [[0.0]] * 4


async def test_a_process_that_cannot_start_is_infrastructure() -> None:
    async with graders("no_such_reward") as pool:
        [error] = await pool.grade([Sample()])
        assert isinstance(error, UnavailableError)
        assert str(error) == "could not be started: it ended its process with exit code 1"


async def test_an_isolated_async_reward_scores_a_group_at_once_and_asks_again_for_what_it_could_not_reach() -> None:
    samples = [Sample(index=i, response=text) for i, text in enumerate(("1", "down", "3"))]
    group = Group(samples, feed_index="sample_0_0")
    rewarder = RunRewards(run_config(custom_rm_path=f"{REWARDS}.meets", **ISOLATED, reward_processes=1), None)
    try:
        with pytest.raises(
            InfrastructureError, match=r"sample 1: .*raised ConnectionError: the judge is down"
        ) as error:
            await rewarder.score(group)
    finally:
        await rewarder.close()
    assert [sample.index for sample in error.value.samples] == [1]
    assert [sample.reward for sample in group] == [1.0, None, 1.0]


async def test_an_isolated_async_reward_that_is_late_is_infrastructure_and_one_that_blocks_costs_its_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("miles_async.rewards.grader_pool.GRACE_SECONDS", 0.5)
    async with graders("waits_or_blocks", timeout_seconds=1.0, is_async=True) as pool:
        results = await pool.grade([Sample(response=text) for text in ("fine", "wait", "block")])
    assert [type(result) for result in results] == [float, UnavailableError, UnfinishedError]


@pytest.mark.parametrize("processes", [1, 2])
async def test_each_grader_process_scores_one_group_at_a_time(processes: int) -> None:
    async with graders("process_id", processes=processes) as pool:
        rewards = await asyncio.gather(*(pool.grade([Sample(), Sample()]) for _ in range(4)))
        assert all(first == second for first, second in rewards)
        assert len({first for first, _ in rewards}) == processes


@pytest.mark.parametrize(
    "response, label, expected",
    [
        (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("the sum is 1,000", "1000", 1.0),
        (r"first \boxed{4}, then \boxed{5}", "4", 0.0),
        ("", "4", 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
    ],
)
def test_mathematical_answers_are_compared_by_value(response: str, label: Any, expected: float) -> None:
    assert mathematics.math(None, Sample(response=response, label=label)) == expected


async def test_mathematical_answers_are_checked_in_a_separate_process() -> None:
    assert await scored(r"so \boxed{\sqrt{4}}", r"\boxed{3}", label="2", rm_type="math") == [1.0, 0.0]
    with pytest.raises(TrajectoryError, match=r"sample 0: reward math raised TypeError: the label is \[\], a list"):
        await scored("4", label=[], rm_type="math")


def test_dapo_reads_the_answer_line_and_deepscaler_the_text_after_the_reasoning() -> None:
    right = mathematics.dapo(None, Sample(response="Answer: 1/2", label="0.5"))
    assert right == {"score": 1.0, "acc": 1.0, "pred": "1/2"}
    assert mathematics.dapo(None, Sample(response="it is 0.5", label="0.5"))["score"] == -1.0
    assert mathematics.dapo(None, Sample(response="Answer: 34<|im_end|>", label="34"))["score"] == 1.0

    def deepscaler(response: str, label: Any) -> float:
        return mathematics.deepscaler(None, Sample(response=response, label=label))

    assert deepscaler(r"hm</think> \boxed{x+1}", r"\boxed{1+x}") == 1.0
    assert deepscaler(r"hm \boxed{4}", "4") == 0.0
    assert deepscaler(r"hm</think> \boxed{4}", ["3", "4"]) == 1.0
    with pytest.raises(TypeError, match=r"the label is \{\}, a dict"):
        deepscaler(r"</think>\boxed{4}", {})


@pytest.mark.parametrize(
    "language, text",
    [("de", "Das ist ein kurzer Satz."), ("kn", "ಇದು ಕನ್ನಡ"), ("zh-cn", "这是一个短句子"), ("en", "So it is.")],
)
def test_ifeval_checks_the_language_of_a_response(language: str, text: str) -> None:
    name = "language:response_language"
    assert follows(text, name, {"language": language})
    assert not follows("Bonjour tout le monde, comment allez-vous ?", name, {"language": language})
