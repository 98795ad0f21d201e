from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from miles_async.batching.advantages import overlong_penalty, score_samples
from miles_async.config.checks import problems
from miles_async.errors import UserError
from miles_async.losses.advantages.estimator import ADVANTAGES
from miles_async.losses.advantages.statistics import group_advantages, whiten
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.plugin_packages import install_plugin


def test_an_advantage_is_the_difference_to_the_mean_reward_of_the_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], [1] * 4, std_normalization=False) == [0.5, -0.5, -0.5, 0.5]


def test_std_normalization_makes_the_sample_deviation_of_a_group_one() -> None:
    rewards = [10.0, 0.0, 3.0, 10.0]
    advantages = group_advantages(rewards, [1] * 4, std_normalization=True)
    assert np.std(advantages, ddof=1) == pytest.approx(1)
    assert advantages == pytest.approx([(reward - 5.75) / (np.std(rewards, ddof=1) + 1e-6) for reward in rewards])


def test_nearly_equal_rewards_give_small_advantages() -> None:
    assert group_advantages([0.5, 0.5 + 1e-7], [1, 1], std_normalization=True)[1] == pytest.approx(0.0467, abs=1e-4)


def test_a_group_of_one_trajectory_has_no_deviation_to_divide_by() -> None:
    assert group_advantages([0.0, 3.0, 3.0], [1 / 3] * 3, std_normalization=True) == pytest.approx([-2, 1, 1])


@pytest.mark.parametrize("std_normalization", [True, False])
def test_equal_rewards_teach_nothing(std_normalization: bool) -> None:
    assert group_advantages([0.7, 0.7, 0.7], [1] * 3, std_normalization=std_normalization) == [0.0, 0.0, 0.0]
    assert group_advantages([1.0], [1], std_normalization=std_normalization) == [0.0]


def test_whitened_values_have_mean_0_and_the_variance_1_of_a_sample_over_the_weights() -> None:
    random = np.random.default_rng(0)
    values, weights = random.normal(3, 2, 50), random.integers(1, 9, 50)
    white = np.array(whiten(values.tolist(), weights.tolist()))
    assert np.average(white, weights=weights) == pytest.approx(0, abs=1e-9)
    assert weights @ white**2 / (weights.sum() - 1) == pytest.approx(1, abs=1e-5)
    assert whiten([2.0, 2.0], [1, 5]) == [0, 0]
    assert whiten([1.0, 2.0], [0, 0]) == [0, 0]
    # As in slime, verl and ROLL, 1e-8 is added to the variance.
    assert whiten([0.0, 2e-4], [1, 1])[1] == pytest.approx(1e-4 / (2e-8 + 1e-8) ** 0.5)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_makes_all_compared_advantages_nan(reward: float) -> None:
    """Then the loss is not finite, and the learner skips the step instead of training on the other samples."""
    for rewards in ([reward, 1.0], [reward, -reward], [reward] * 2):
        for found in (
            group_advantages(rewards, [1, 1], std_normalization=True),
            group_advantages(rewards, [1, 1], std_normalization=False),
            whiten(rewards, [1, 3]),
        ):
            assert [math.isnan(advantage) for advantage in found] == [True, True]


def test_rewards_whose_squares_overflow_are_normalized_correctly() -> None:
    assert group_advantages([1e200, 0.0], [1, 1], std_normalization=True) == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert whiten([1e200, 0.0], [1, 1]) == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_the_overlong_penalty_grows_linearly_over_the_buffer() -> None:
    penalties = [overlong_penalty(length, longest=100, buffer=20) for length in (10, 80, 85, 100, 120)]
    assert penalties == [0, 0, -0.25, -1, -1]


@pytest.mark.parametrize("result, failure", [("rewards['mean']", "TypeError"), ("None", "TypeError")])
def test_an_estimator_of_a_package_that_raises_is_named_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str, failure: str
) -> None:
    source = (
        "from miles_async.losses.advantages.estimator import AdvantageEstimator\n"
        "class Centred(AdvantageEstimator):\n"
        f"    def advantages(self, rewards, weights, settings): return {result}\n"
    )
    install_plugin(tmp_path, monkeypatch, ADVANTAGES, "centred", "raising_estimator:Centred", source)
    named = "the entry point centred = raising_estimator:Centred of the distribution users failed to compute advantages"
    with pytest.raises(UserError, match=f"^{named}: {failure}.*; correct the plug-in$"):
        score_samples([Group([Sample(index=0, reward=1.0)])], run_config(advantage_estimator="centred").algorithm, 8)


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_without_rewards_normalization_the_advantages_are_the_rewards(estimator: str) -> None:
    logprobs = [-1.0] * 2
    group = Group(
        Sample(tokens=[1, 2, index], response_length=2, rollout_log_probs=logprobs, reward=reward)
        for index, reward in enumerate((1.0, 4.0))
    )
    raw = run_config(advantage_estimator=estimator, rewards_normalization=False)
    assert [one.advantage for one in score_samples([group], raw.algorithm, 10)] == [1.0, 4.0]


def test_without_rewards_normalization_a_group_needs_no_second_sample() -> None:
    settings: dict[str, object] = {"reasoning_gym_task": "chain_sum", "rm_type": "reasoning_gym"}
    settings |= {"rollout_max_response_len": 8, "n_samples_per_prompt": 1}
    assert problems(run_config(**settings, rewards_normalization=False), "train_async.py") == []
    [sentence] = problems(run_config(**settings), "train_async.py")
    assert sentence.startswith("n_samples_per_prompt 1 gives no training signal")
