"""CISPO: a clipped weight instead of a clipped objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_async.losses.objectives.objective import Objective, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(Objective):
    """Clips the weight of each token's gradient and keeps the gradient (arXiv 2506.13585)."""

    name = "cispo"
    paper = "arXiv 2506.13585, section 3.1"
    aggregation = "token_mean"
    # No lower bound: a ratio is never below 0. The paper tunes the upper one and does not name it.
    clip = (1.0, 0.2)
    clip_is_published = False
    scales_with_advantage = True

    def compute(self, tokens: PolicyTokens, settings: Any) -> tuple[Tensor, Tensor]:
        """sg(clip(r)) A log p, where sg stops the gradient, and 1 where the weight was clipped (equation 4).

        Only the weight is clipped, so every token keeps its gradient. Rare tokens that change the course of an argument
        have large ratios, and PPO's clip would remove them.
        """
        low, high = tokens.clip
        ratio = tokens.ratio.detach()
        weight = ratio.clamp(1 - low, 1 + high)
        return weight * tokens.advantages * tokens.logprobs, (weight != ratio).to(ratio.dtype)
