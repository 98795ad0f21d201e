"""Rewards of single texts under slime's names."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.compat.slime.rewards import (
    compute_gpqa_reward,
    compute_score,
    extract_answer,
    f1_score,
    get_deepscaler_rule_based_reward,
    grade_answer_verl,
)
from miles_async.compat.slime.rm_hub import async_rm, batched_async_rm
from miles_async.rollout.contract import flat_args
from miles_async.types import Sample
from tests.configuration import run_config

BOXED = "<think>6 times 7</think> The answer is \\boxed{42}."


def length(args: Any, sample: Sample, scale: float = 1.0) -> float:
    return scale * len(sample.response)


async def lengths(args: Any, samples: list[Sample], scale: float = 1.0) -> list[float]:
    return [scale * len(sample.response) for sample in samples]


@pytest.mark.parametrize("response, right", [(BOXED, True), ("<think></think>\\boxed{41}", False), ("42", False)])
def test_an_answer_counts_if_its_box_has_the_label(response: str, right: bool) -> None:
    assert grade_answer_verl(response, "42") is right
    assert get_deepscaler_rule_based_reward(response, "42") == int(right)


def test_the_answer_of_a_box_is_extracted() -> None:
    assert (extract_answer(BOXED), extract_answer("42")) == ("42", None)


def test_dapo_reads_the_answer_line_or_the_text_of_the_last_box() -> None:
    assert compute_score("so\nAnswer: 42", "42") == {"score": 1.0, "acc": 1.0, "pred": "42"}
    assert compute_score(BOXED, "42")["score"] == -1.0
    assert compute_score(BOXED, "42", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "42"}
    assert compute_score("\\boxed{42}" + " " * 100, "42", strict_box_verify=True)["score"] == -1.0


def test_the_f1_score_comes_with_precision_and_recall() -> None:
    assert f1_score("the cat sat", "a cat") == (2 / 3, 1 / 2, 1.0)
    assert f1_score("dog", "cat") == (0.0, 0.0, 0.0)


def test_a_choice_of_several_is_right_if_it_is_the_letter_of_the_label() -> None:
    assert compute_gpqa_reward("The answer is (C).", "C", {"choices": ["x", "y", "z"]}) == 1.0
    assert compute_gpqa_reward("The answer is (B).", "C") == 0.0


async def test_keyword_arguments_reach_the_reward_of_the_user() -> None:
    args = flat_args(run_config(custom_rm_path=f"{__name__}.length", rm_type=None))
    samples = [Sample(response="ab"), Sample(response="abc")]
    assert await async_rm(args, samples[0], scale=0.5) == 1.0
    assert await batched_async_rm(args, samples, scale=2.0) == [4.0, 6.0]
    of_groups = flat_args(run_config(custom_rm_path=f"{__name__}.lengths", rm_type=None, group_rm=True))
    assert await batched_async_rm(of_groups, samples, scale=2.0) == [4.0, 6.0]
