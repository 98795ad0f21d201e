"""Importance weights for tokens that were sampled by another policy than the one being trained.

The sampling policy differs because its weights are older, or because the engine rounds differently. In this module
`log_ratio` [m] is the log-probability of each token under the weights before the first optimizer step on the batch,
minus the log-probability that the engine reported. The weights carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles_async.losses.objectives import sequence_sum

Correction = Literal["tis", "decoupled", "icepop", "sequence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Choice of the correction and its bounds."""

    method: Correction
    upper: float
    """Upper bound of the weight, for `tis` and `sequence`."""
    band: tuple[float, float]
    """`icepop` leaves out tokens whose ratio is outside this range."""


def importance_weights(log_ratio: Tensor, sequences: Tensor, settings: CorrectionSettings) -> tuple[Tensor, Tensor]:
    """[m] weight of each token's objective, and [m] 1 where a bound changed the weight, else 0."""
    log_ratio = log_ratio.detach()
    match settings.method:
        case "tis":
            return truncated_weights(log_ratio.exp(), settings.upper)
        case "decoupled":
            return decoupled_weights(log_ratio.exp())
        case "icepop":
            return icepop_weights(log_ratio.exp(), *settings.band)
        case "sequence":
            return truncated_weights(sequence_sum(log_ratio, sequences).exp(), settings.upper)
        case "none":
            return torch.ones_like(log_ratio), torch.zeros_like(log_ratio)


def truncated_weights(ratio: Tensor, upper: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: min(ratio, upper).

    The ratio is that of a token, or that of a whole sequence, which is unbiased but has a higher variance.
    Source: Ionides 2008; for RL with separate engines Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; for sequences Liu et al. 2025, "When speed kills stability".
    """
    return ratio.clamp(max=upper), (ratio > upper).to(ratio.dtype)


def decoupled_weights(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The unbounded ratio: it corrects for the behaviour policy, while the objective clips around the proximal one.

    Source: Hilton et al. 2021 (arXiv 2110.00641), equation 4; in asynchronous RL AReaL (arXiv 2505.24298).
    """
    return ratio, torch.zeros_like(ratio)


def icepop_weights(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The ratio inside [low, high] and 0 outside: tokens on which the two policies disagree are left out.

    Source: IcePop, Ling Team 2025 (arXiv 2510.18855), section 3.
    """
    masked = (ratio < low) | (ratio > high)
    return torch.where(masked, 0.0, ratio), masked.to(ratio.dtype)
