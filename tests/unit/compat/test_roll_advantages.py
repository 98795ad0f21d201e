"""What ROLL makes of the rewards of a batch."""

from __future__ import annotations

from math import isnan
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.compat.roll.advantages import advantages, agentic_advantages, mask
from miles_async.types import FROM_DATASET, Group, Sample, SampleStatus


def batch(*rewards: float, tokens: int = 10) -> list[Sample]:
    return [Sample(index=index, reward=reward, response_length=tokens) for index, reward in enumerate(rewards)]


def settings(**others: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "n_samples_per_prompt": 2,
        "norm_mean_type": None,
        "norm_std_type": None,
        "reward_clip": None,
        "whiten_advantages": False,
        "advantage_clip": None,
        "max_len_mask": False,
        "difficulty_mask": False,
        "difficulty_low_threshold": 0.1,
        "difficulty_high_threshold": 0.95,
    }
    return SimpleNamespace(**given | others)


def test_without_normalization_an_advantage_is_the_reward() -> None:
    assert advantages(settings(), batch(0, 1, 1, 5)) == ([0, 1, 1, 5], [0, 1, 1, 5])


@pytest.mark.parametrize("kind, members", [("group", [[0.0, 1.0], [1.0, 5.0]]), ("batch", [[0.0, 1.0, 1.0, 5.0]] * 2)])
def test_rewards_are_normalized_over_their_group_or_the_batch(kind: str, members: list[list[float]]) -> None:
    _, found = advantages(settings(norm_mean_type=kind, norm_std_type=kind), batch(0, 1, 1, 5))
    rewards = [0, 1, 1, 5]
    expected = [
        (reward - fmean(members[position // 2])) / (stdev(members[position // 2]) + 1e-6)
        for position, reward in enumerate(rewards)
    ]
    assert found == pytest.approx(expected)


def test_samples_of_a_prompt_are_found_by_their_positions_in_the_data() -> None:
    samples = batch(0, 1, 1, 5)
    _, ordered = advantages(settings(norm_mean_type="group"), samples)
    _, shuffled = advantages(settings(norm_mean_type="group"), [samples[0], samples[2], samples[1], samples[3]])
    assert shuffled == [ordered[0], ordered[2], ordered[1], ordered[3]]


def test_rewards_and_advantages_are_clipped() -> None:
    assert advantages(settings(reward_clip=2), batch(-9, 1))[1] == [-2, 1]
    assert advantages(settings(norm_mean_type="batch", advantage_clip=0.5), batch(0, 9))[1] == [-0.5, 0.5]


def test_advantages_are_whitened_over_the_tokens_that_are_trained() -> None:
    long, short, removed = batch(1, 0, 7)
    long.response_length, short.loss_mask, removed.remove_sample = 30, [1] * 6 + [0] * 4, True
    _, found = advantages(settings(whiten_advantages=True), [long, short, removed])
    tokens = [found[0]] * 30 + [found[1]] * 6
    assert fmean(tokens) == pytest.approx(0, abs=1e-9)
    assert fmean(value**2 for value in tokens) == pytest.approx(1, rel=1e-4)


def test_each_data_set_is_normalized_for_itself() -> None:
    samples = batch(0, 1, 10, 30)
    for sample, name in zip(samples, ("math", "math", "code", "code"), strict=True):
        sample.metadata[FROM_DATASET] = {"name": name, "epochs": 0.0}
    _, found = advantages(settings(norm_mean_type="batch"), samples)
    assert found == [-0.5, 0.5, -10, 10]


def test_a_reward_that_is_not_finite_makes_all_advantages_nan() -> None:
    assert all(map(isnan, advantages(settings(whiten_advantages=True), batch(0, float("inf")))[1]))


def test_groups_that_are_too_easy_or_too_hard_are_not_trained() -> None:
    groups = [Group(batch(0, 0)), Group(batch(0, 1)), Group(batch(1, 1)), Group(batch(0))]
    mask(settings(difficulty_mask=True), groups)
    assert [[sample.remove_sample for sample in group] for group in groups] == [
        [True, True],
        [False, False],
        [True, True],
        [False],
    ]


def test_truncated_samples_are_not_trained() -> None:
    group = Group(batch(0, 1))
    group[0].status = SampleStatus.TRUNCATED
    mask(settings(max_len_mask=True), [group])
    assert [sample.remove_sample for sample in group] == [True, False]


def test_data_sets_of_agents_are_normalized_together() -> None:
    samples = batch(0, 1, 1, 5)
    for sample, name in zip(samples, "aabb", strict=True):
        sample.metadata[FROM_DATASET] = {"name": name, "epochs": 0.0}
    by_batch = settings(norm_mean_type="batch")
    assert agentic_advantages(by_batch, samples)[1] == [-1.75, -0.75, -0.75, 3.25]
    assert advantages(by_batch, samples)[1] == [-0.5, 0.5, -2, 2]
