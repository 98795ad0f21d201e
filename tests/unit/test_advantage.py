from __future__ import annotations

import pytest

from miles_async.core.advantage import group_advantages


def test_an_advantage_is_the_distance_from_the_groups_mean_reward() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], std_normalization=False) == [0.5, -0.5, -0.5, 0.5]


def test_std_normalization_makes_the_spread_of_a_group_one() -> None:
    assert group_advantages([10.0, 0.0, 0.0, 10.0], std_normalization=True) == pytest.approx([1, -1, -1, 1])


@pytest.mark.parametrize("std_normalization", [True, False])
def test_equal_rewards_teach_nothing(std_normalization: bool) -> None:
    assert group_advantages([0.7, 0.7, 0.7], std_normalization=std_normalization) == [0.0, 0.0, 0.0]
    assert group_advantages([1.0], std_normalization=std_normalization) == [0.0]
