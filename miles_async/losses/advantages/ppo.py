"""PPO: a critic estimates the advantage of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_async.losses.advantages.estimator import AdvantageEstimator


class Ppo(AdvantageEstimator):
    """Trains a critic and estimates generalized advantages (GAE)."""

    name = "ppo"
    compares_samples = False
    trains_critic = discounts = True

    def advantages(self, rewards: Sequence[float], weights: Sequence[float], settings: Any) -> Sequence[float]:
        """The rewards."""
        return rewards
