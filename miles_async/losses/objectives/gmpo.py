"""GMPO: the geometric mean of a sequence's ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_async.losses.objectives.objective import Objective, PolicyTokens
from miles_async.losses.sequences import sequence_mean

if TYPE_CHECKING:
    from torch import Tensor


class Gmpo(Objective):
    """Takes the geometric mean of a sequence's clipped ratios (arXiv 2507.20673)."""

    name = "gmpo"
    paper = "arXiv 2507.20673, equation 4 and section 4"
    aggregation = "sequence_mean"
    clip = (0.4, 0.4)
    clips_log_ratios = True
    ratio_of_sequence = True
    scales_with_advantage = True

    def compute(self, tokens: PolicyTokens, settings: Any) -> tuple[Tensor, Tensor]:
        """The geometric mean of a sequence's clipped ratios times A, and 1 where clipping removed a token's gradient.

        The clip bounds log-ratios to [-low, high]. The geometric mean is less sensitive to a few tokens with large
        ratios than the arithmetic mean of GRPO, so a wider clip range works (0.4 in the paper).
        Source: GMPO (arXiv 2507.20673), equation 4.
        """
        low, high = tokens.clip
        log_ratio = tokens.logprobs - tokens.old_logprobs
        sign = tokens.advantages.sign()
        # As in PPO, only a move in the direction of the advantage is clipped.
        limited = log_ratio.clamp(-low, high)
        clipped = sign * limited < sign * log_ratio
        mean = sequence_mean(limited.where(clipped, log_ratio), tokens.sequences)
        return mean.exp() * tokens.advantages, clipped.to(log_ratio.dtype)
