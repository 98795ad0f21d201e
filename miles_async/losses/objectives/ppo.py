"""PPO's clipped ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from miles_async.losses.objectives.objective import Objective, PolicyTokens
from miles_async.section import Section

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

    class Settings(Section):
        """The second clip."""

        eps_clip_c: float | None = Field(None, gt=1)
        """Largest policy ratio with which a token of negative advantage is trained (dual clip, arXiv 1912.09729). The
        usual clip does not bound these ratios. Only policy_objective ppo and gspo use it. If unset, there is no such
        bound; 3 is a usual value."""

    def compute(self, tokens: PolicyTokens, settings: Settings) -> tuple[Tensor, Tensor]:
        """min(r A, clip(r) A), and 1 where clipping removed the gradient (equation 7)."""
        return clipped_objective(tokens.ratio, tokens, settings.eps_clip_c)


def clipped_objective(ratio: Tensor, tokens: PolicyTokens, dual_clip: float | None = None) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), and 1 where clipping removed the gradient, for any `ratio` [m].

    With `dual_clip` c, the objective of a negative advantage is at least c A (arXiv 1912.09729, equation 5).
    """
    low, high = tokens.clip
    unclipped = ratio * tokens.advantages
    clipped = ratio.clamp(1 - low, 1 + high) * tokens.advantages
    objective, bounded = unclipped.minimum(clipped), clipped < unclipped
    if dual_clip is not None:
        lowest = dual_clip * tokens.advantages
        beyond = (tokens.advantages < 0) & (objective < lowest)
        objective, bounded = lowest.where(beyond, objective), bounded | beyond
    return objective, bounded.to(ratio.dtype)
