"""PPO's clipped ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_async.losses.objectives.objective import Objective, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(Objective):
    """Clips the ratio of each token (arXiv 1707.06347).

    GRPO (arXiv 2402.03300) uses the objective unchanged, and DAPO (arXiv 2503.14476, section 3.1) with a higher upper
    clip.
    """

    name = "ppo"
    clip = (0.2, 0.2)
    scales_with_advantage = True

    def compute(self, tokens: PolicyTokens, settings: Any) -> tuple[Tensor, Tensor]:
        """min(r A, clip(r) A), and 1 where clipping removed the gradient (equation 7)."""
        return clipped_objective(tokens.ratio, tokens)


def clipped_objective(ratio: Tensor, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), and 1 where clipping removed the gradient, for any `ratio` [m]."""
    low, high = tokens.clip
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - low, 1 + high) * tokens.advantages
    return unclipped.minimum(clipped), (clipped < unclipped).to(ratio.dtype)
