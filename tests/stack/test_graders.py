"""Rewards in separate processes: a reward that hangs is ended, and one that dies fails its sample."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_async.errors import TrajectoryError
from miles_async.rewards import mathematics
from miles_async.rewards.graders import GraderError, Graders
from miles_async.rewards.instructions import follows
from miles_async.types import Sample
from tests.scoring import scored

pytestmark = pytest.mark.stack
REWARDS = "tests.stack.isolated_rewards"
ISOLATED: dict[str, Any] = {"custom_rm_isolated": True, "reward_timeout_seconds": 60.0}


async def test_an_isolated_reward_scores_a_group_in_one_call() -> None:
    assert await scored("a", "b", custom_rm_path=f"{REWARDS}.positions", group_rm=True, **ISOLATED) == [0.0, 1.0]


async def test_an_isolated_reward_runs_in_another_process_and_sees_the_settings() -> None:
    path = f"{REWARDS}.length"
    assert await scored("ab", "", custom_rm_path=path, n_samples_per_prompt=4, **ISOLATED) == [6.0, 4.0]


async def test_an_isolated_reward_that_hangs_is_ended_at_its_deadline_and_the_next_sample_is_scored() -> None:
    graders = Graders(f"{REWARDS}.hangs", "custom_rm_path", {}, processes=1, timeout_seconds=1.0)
    try:
        with pytest.raises(GraderError) as failure:
            await graders.grade([Sample(response="fine"), Sample(response="hang")])
        assert str(failure.value) == "took longer than 1 s (reward_timeout_seconds); its process was killed"
        assert await graders.grade([Sample(response="fine")]) == [1.0]
    finally:
        await graders.close()


async def test_an_isolated_reward_that_ends_its_process_fails_its_sample() -> None:
    with pytest.raises(TrajectoryError, match=r"group sample_0_0: reward .*\.exits ended its process with exit code 3"):
        await scored("x", custom_rm_path=f"{REWARDS}.exits", **ISOLATED)


@pytest.mark.parametrize("processes", [1, 2])
async def test_each_grader_process_scores_one_group_at_a_time(processes: int) -> None:
    graders = Graders(f"{REWARDS}.process_id", "custom_rm_path", {}, processes, timeout_seconds=60.0)
    try:
        rewards = await asyncio.gather(*(graders.grade([Sample()]) for _ in range(4)))
        assert len({number for [number] in rewards}) == processes
    finally:
        await graders.close()


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
    with pytest.raises(TrajectoryError, match=r"reward math raised TypeError: the label is \[\], a list.*\(sample 0\)"):
        await scored("4", label=[], rm_type="math")


def test_dapo_reads_the_answer_line_and_deepscaler_the_text_after_the_reasoning() -> None:
    right = mathematics.dapo(None, Sample(response="Answer: 1/2", label="0.5"))
    assert right == {"score": 1.0, "acc": 1.0, "pred": "1/2"}
    assert mathematics.dapo(None, Sample(response="it is 0.5", label="0.5"))["score"] == -1.0

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
