"""REINFORCE, and two objectives that add to it what old samples need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeFloat

from miles_async.losses.objectives.objective import Objective, PolicyTokens
from miles_async.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Reinforce(Objective):
    """The policy gradient itself: nothing limits how far a batch may move the policy (Williams 1992)."""

    name = "reinforce"
    scales_with_advantage = True

    def compute(self, tokens: PolicyTokens, settings: Any) -> tuple[Tensor, Tensor]:
        """A log p, and zeros."""
        return tokens.advantages * tokens.logprobs, tokens.logprobs.new_zeros(len(tokens.logprobs))


class Topr(Objective):
    """The policy gradient for samples with a positive reward. That of the others is weighted by at most 1 (arXiv
    2503.14286).

    The paper weights whole responses. The ratio here is that of a token, as in ROLL's pg_variant topr.
    """

    name = "topr"
    scales_with_advantage = True

    class Settings(Section):
        """The weights of both kinds of samples."""

        topr_positive_weight: NonNegativeFloat = 1.0
        """Factor of the objective of policy_objective topr for samples with a reward above 0."""
        topr_negative_weight: NonNegativeFloat = 1.0
        """Factor of the objective of policy_objective topr for samples with a reward of 0 or less."""

    def compute(self, tokens: PolicyTokens, settings: Settings) -> tuple[Tensor, Tensor]:
        """A log p, times min(r, 1) without a gradient if the reward is not positive, and 1 where that limited r.

        Source: TOPR (arXiv 2503.14286), equation 8.
        """
        ratio, positive = tokens.ratio.detach(), tokens.rewards > 0
        tapered = settings.topr_negative_weight * ratio.clamp(max=1)
        weight = tapered.masked_fill(positive, settings.topr_positive_weight)
        return weight * tokens.advantages * tokens.logprobs, (~positive & (ratio > 1)).to(ratio.dtype)


class Kimi15(Objective):
    """The policy gradient, less the squared distance from the policy before the batch (Kimi k1.5, arXiv 2501.12599).

    The paper takes the log-ratio of whole responses. That of a token is taken here, as in ROLL's pg_variant kimi15.
    """

    name = "kimi15"

    class Settings(Section):
        """How much the distance counts."""

        kimi15_tau: NonNegativeFloat = 0.1
        """Factor of half the squared log-ratio, which policy_objective kimi15 subtracts."""

    def compute(self, tokens: PolicyTokens, settings: Settings) -> tuple[Tensor, Tensor]:
        """A log p - tau / 2 (log r)^2, and zeros. Source: Kimi k1.5 (arXiv 2501.12599), equation 3."""
        distance = (tokens.logprobs - tokens.old_logprobs).square() / 2
        objective = tokens.advantages * tokens.logprobs - settings.kimi15_tau * distance
        return objective, objective.new_zeros(len(objective))
