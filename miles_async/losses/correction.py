"""Weights for tokens that another policy sampled than the one being trained: older, or rounded otherwise.

`gap` [n] is log p of each token under the weights before the drain's first step minus log p as the engine reported it.
The weights carry no gradient.
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
    method: Correction
    upper: float
    """Upper bound of the weight under `tis` and `sequence`."""
    band: tuple[float, float]
    """Outside of these ratios `icepop` leaves a token out."""


def importance_weights(gap: Tensor, sequences: Tensor, settings: CorrectionSettings) -> tuple[Tensor, Tensor]:
    """[n] what each token's objective is multiplied by, and 1 where the bound changed it."""
    gap = gap.detach()
    match settings.method:
        case "tis":
            return truncated(gap.exp(), settings.upper)
        case "decoupled":
            return decoupled(gap.exp())
        case "icepop":
            return icepop(gap.exp(), *settings.band)
        case "sequence":
            return truncated(sequence_sum(gap, sequences).exp(), settings.upper)
        case "none":
            return torch.ones_like(gap), torch.zeros_like(gap)


def truncated(ratio: Tensor, upper: float) -> tuple[Tensor, Tensor]:
    """min(ratio, upper). Of tokens: truncated importance sampling; of whole sequences: its unbiased, wilder form.

    Source: Ionides 2008; for RL with separate engines Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; for sequences Liu et al. 2025, "When speed kills stability".
    """
    return ratio.clamp(max=upper), (ratio > upper).to(ratio.dtype)


def decoupled(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The ratio as it is: the clip is around the proximal policy, the weight corrects for the behaviour policy.

    Source: Hilton et al. 2021 (arXiv 2110.00641), equation 4; in asynchronous RL AReaL (arXiv 2505.24298).
    """
    return ratio, torch.zeros_like(ratio)


def icepop(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The ratio inside [low, high], 0 outside: a token the two policies disagree about teaches nothing.

    Source: IcePop, Ling Team 2025 (arXiv 2510.18855), section 3.
    """
    masked = (ratio < low) | (ratio > high)
    return torch.where(masked, 0.0, ratio), masked.to(ratio.dtype)
