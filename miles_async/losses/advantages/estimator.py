"""What an advantage estimator provides: how the rewards of a group become advantages.

An estimator is a subclass of `AdvantageEstimator` (see `miles_async/plugins.py`), which `--advantage-estimator`
selects:

    [project.entry-points."miles_async.losses.advantages"]
    my_estimator = "my_package:MyEstimator"

It runs in the rollout worker, on numbers. An estimator that needs tensors, such as log-probabilities, is a function
that `--custom-advantage-function-path` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from miles_async.plugins import Kind, Plugin


class AdvantageEstimator(Plugin):
    """How rewards become advantages."""

    compares_samples: ClassVar[bool] = True
    """Whether a group needs two samples or more for an advantage."""
    normalizes_batch: ClassVar[bool] = False
    """Whether advantages are shifted and scaled to mean 0 and variance 1 over the trained tokens of the batch."""
    discounts: ClassVar[bool] = False
    """Whether `gamma` discounts the reward of a sample for its earlier tokens."""
    trains_critic: ClassVar[bool] = False
    """Whether `advantages` are rewards, from which a critic's values give the advantage of each token (GAE)."""
    objective: ClassVar[str | None] = None
    """The policy objective that the estimator selects; None if it works with each of them."""
    same_advantages: ClassVar[str | None] = None
    """The estimator that computes the same advantages and works with each objective."""

    @property
    def penalizes_rewards(self) -> bool:
        """Whether a KL penalty (`kl_coef`) is a part of the rewards instead of the finished advantages."""
        return self.normalizes_batch or self.trains_critic

    def advantages(self, rewards: Sequence[float], weights: Sequence[float], settings: Any) -> Sequence[float]:
        """Return the advantage of each sample of a group from the rewards of its samples.

        `weights` are those of the samples in statistics of the group: the segments of a trajectory add up to 1. If a
        reward is not finite, the advantages are NaN, so that the learner skips the step. `settings` is an instance of
        `Settings`.
        """
        raise NotImplementedError


ADVANTAGES = Kind("advantage estimator", AdvantageEstimator, "miles_async.losses.advantages")
