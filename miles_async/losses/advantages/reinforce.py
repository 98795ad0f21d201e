"""REINFORCE++ (arXiv 2501.03262): advantages are normalized over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_async.losses.advantages.estimator import AdvantageEstimator
from miles_async.losses.advantages.statistics import group_advantages


class ReinforcePlusPlus(AdvantageEstimator):
    """Normalizes rewards over the batch."""

    name = "reinforce_plus_plus"
    compares_samples = False
    normalizes_batch = discounts = True

    def advantages(self, rewards: Sequence[float], weights: Sequence[float], settings: Any) -> Sequence[float]:
        """The rewards."""
        return rewards


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """Subtracts the mean of the group, and then normalizes over the batch."""

    name = "reinforce_plus_plus_baseline"
    normalizes_batch = True

    def advantages(self, rewards: Sequence[float], weights: Sequence[float], settings: Any) -> Sequence[float]:
        """The reward less the mean of the group."""
        return group_advantages(rewards, weights, std_normalization=False)
