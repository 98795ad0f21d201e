"""What ROLL makes of the rewards of a batch."""

from __future__ import annotations

from math import isnan, sqrt
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from miles_async.compat.roll.advantages import advantages, agentic_advantages, mask, step_advantages
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
    assert sum(value**2 for value in tokens) / (len(tokens) - 1) == pytest.approx(1, rel=1e-4)


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


def test_penalties_make_no_group_harder_or_easier() -> None:
    """As in ROLL, a group is as difficult as its answers are wrong, whatever wrong answers and repetition cost."""

    def group(*rewards: tuple[float, float]) -> Group:
        samples = batch(*(0.0 for _ in rewards))
        for sample, (score, acc) in zip(samples, rewards, strict=True):
            sample.reward, sample.reward_key = {"score": score, "acc": acc}, "score"
        return Group(samples)

    hard, easy = group((1.0, 1.0), (-1.0, 0.0)), group((0.9, 1.0), (0.8, 1.0))
    mask(settings(difficulty_mask=True), [hard, easy])
    assert [[sample.remove_sample for sample in one] for one in (hard, easy)] == [[False, False], [True, True]]


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


def test_agents_of_a_group_with_equal_rewards_have_no_advantage_whatever_the_batch_has() -> None:
    """The deviation of the group is 0, and ROLL's agentic pipeline divides by no such number."""
    of_group = settings(norm_mean_type="batch", norm_std_type="group")
    found = agentic_advantages(of_group, batch(3, 3, 0, 2))[1]
    assert found == pytest.approx([0, 0, -(2**0.5), 0], rel=1e-5)


def trajectories(*of: list[tuple[float, str]]) -> list[Sample]:
    """Trajectories whose steps have these rewards and states; each step is a segment."""
    return [
        Sample(
            index=index,
            reward=sum(reward for reward, _ in steps),
            response_length=10,
            metadata={"step": {"reward": reward, "state": state}},
        )
        for index, steps in enumerate(of)
        for reward, state in steps
    ]


def of_steps(**others: Any) -> SimpleNamespace:
    rewards = {"step_reward_gamma": 0.5, "step_reward_weight": None, "episode_reward_weight": None}
    return settings(**rewards, state_norm_mean_type="group", state_norm_std_type=None, **others)


def test_the_reward_of_a_step_is_discounted_from_the_end_of_its_trajectory() -> None:
    samples = trajectories([(1, "a"), (0, "b"), (4, "c")], [(2, "a")])
    # 4, 0 + 0.5 * 4, and 1 + 0.5 * 2.
    assert step_advantages(of_steps(), samples) == ([5, 5, 5, 2], [2, 2, 4, 2])


@pytest.mark.parametrize(
    "norms, expected",
    [
        # Returns 2, 2, 4 and 2 in one group, and 6 in another one: means 2.5 and 6, over all 3.2.
        ({"norm_mean_type": "group"}, [-0.5, -0.5, 1.5, -0.5, 0]),
        ({"norm_mean_type": "batch"}, [-1.2, -1.2, 0.8, -1.2, 2.8]),
        # The deviation is 1 in the first group, and the second one has none.
        ({"norm_mean_type": "group", "norm_std_type": "group"}, [-0.5, -0.5, 1.5, -0.5, 0]),
        # The squared differences to 3.2 add up to 12.8.
        (
            {"norm_mean_type": "group", "norm_std_type": "batch"},
            [value / sqrt(12.8 / 4) for value in (-0.5, -0.5, 1.5, -0.5, 0)],
        ),
    ],
)
def test_all_steps_of_a_group_or_of_the_batch_count_in_its_statistics(
    norms: dict[str, Any], expected: list[float]
) -> None:
    samples = trajectories([(1, "a"), (0, "b"), (4, "c")], [(2, "a")], [(6, "a")])
    assert step_advantages(of_steps(**norms), samples)[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("std_type, scale", [(None, 1.0), ("group", 1 / sqrt(2))])
def test_gigpo_adds_the_advantage_of_the_trajectory_and_that_among_steps_in_the_same_state(
    std_type: str | None, scale: float
) -> None:
    samples = trajectories([(0, "a"), (4, "b")], [(0, "a"), (0, "c")])
    args = of_steps(norm_mean_type="group")
    args.episode_reward_weight, args.step_reward_weight, args.state_norm_std_type = 10.0, 1.0, std_type
    # The rewards of the trajectories are 4 and 0, with mean 2. The returns are 2 and 4, 0 and 0. Only the state "a" has
    # two steps: their mean is 1, and their deviation is the square root of 2.
    assert step_advantages(args, samples)[1] == pytest.approx([20 + scale, 20, -20 - scale, -20], rel=1e-5)


def test_steps_of_all_groups_that_began_in_the_same_state_are_compared() -> None:
    samples = trajectories([(0, "a")], [(0, "b")], [(2, "a")], [(0, "c")])
    args = of_steps()
    args.episode_reward_weight, args.step_reward_weight = 0.0, 1.0
    assert step_advantages(args, samples)[1] == [-1, 0, 1, 0]


def test_rewards_of_steps_are_clipped_and_whitened_as_those_of_trajectories() -> None:
    samples = trajectories([(9, "a"), (1, "b")])
    assert step_advantages(of_steps(reward_clip=3, advantage_clip=2), samples)[1] == [2, 1]
    whitened = step_advantages(of_steps(whiten_advantages=True), samples)[1]
    assert whitened == pytest.approx([0.95**0.5, -(0.95**0.5)], rel=1e-4)  # 20 tokens
    assert all(map(isnan, step_advantages(of_steps(), trajectories([(float("inf"), "a")]))[1]))
