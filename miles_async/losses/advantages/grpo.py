"""GRPO: the samples of a group are compared with each other."""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.losses.advantages.estimator import AdvantageEstimator
from miles_async.losses.advantages.statistics import group_advantages
from miles_async.section import Section


class Grpo(AdvantageEstimator):
    """Compares the samples of a group."""

    name = "grpo"

    class Settings(Section):
        """The normalization within a group."""

        grpo_std_normalization: bool = True
        """Divide the advantages of a group by the standard deviation of its rewards. Turn this off for Dr. GRPO (arXiv
        2503.20783)."""

    def advantages(self, rewards: Sequence[float], weights: Sequence[float], settings: Settings) -> Sequence[float]:
        """The reward less the mean of the group, divided by the standard deviation of the group."""
        return group_advantages(rewards, weights, std_normalization=settings.grpo_std_normalization)


class Gspo(Grpo):
    """As grpo, with policy_objective gspo."""

    name = objective = "gspo"
    same_advantages = "grpo"


class Cispo(Grpo):
    """As grpo, with policy_objective cispo."""

    name = objective = "cispo"
    same_advantages = "grpo"
