"""DPPO: a trust region of probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from miles_async.losses.objectives.objective import Objective, PolicyTokens
from miles_async.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Dppo(Objective):
    """Limits the change of a token's probability since it was sampled, so it needs off_policy_correction none (arXiv
    2602.04879)."""

    name = "dppo"
    paper = "arXiv 2602.04879"
    corrects = True
    scales_with_advantage = True

    class Settings(Section):
        """The trust region."""

        dppo_threshold: float = Field(0.2, gt=0, le=1)
        """Change of a token's probability beyond which policy_objective dppo stops its gradient."""

    def compute(self, tokens: PolicyTokens, settings: Settings) -> tuple[Tensor, Tensor]:
        """sg(r) A log p with r = p / q for the sampling policy q, and 1 where the trust region removed the gradient.

        A token loses its gradient if its probability differs by more than `dppo_threshold` from that under the sampling
        policy (total variation of the token against all others) and the gradient would increase the difference. A bound
        on probabilities treats tokens alike that a bound on ratios does not: a rare token has a large ratio after a
        tiny change. The ratio is limited to 20, as in the authors' code.
        Source: DPPO with the binary total variation (arXiv 2602.04879).
        """
        fixed = tokens.logprobs.detach()
        moved = fixed.exp() - tokens.rollout_log_probs.exp()
        outside = moved.where(tokens.advantages > 0, -moved) > settings.dppo_threshold
        ratio = (fixed - tokens.rollout_log_probs).exp().clamp(max=20.0).masked_fill(outside, 0.0)
        return ratio * tokens.advantages * tokens.logprobs, outside.to(fixed.dtype)
