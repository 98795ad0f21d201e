"""Importance weights without a bound, and no weights at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_async.losses.corrections.correction import Correction

if TYPE_CHECKING:
    from torch import Tensor


class Decoupled(Correction):
    """The ratio of each token without truncation.

    It corrects for the behaviour policy, while the objective clips around the proximal one.
    Source: Hilton et al. 2021 (arXiv 2110.00641), equation 4; in asynchronous RL AReaL (arXiv 2505.24298).
    """

    name = "decoupled"

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
        """r, and zeros."""
        return log_ratio.exp(), log_ratio.new_zeros(len(log_ratio))


class NoCorrection(Correction):
    """Trains such tokens as if they were on-policy."""

    name = "none"
    corrects = False

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
        """Ones, and zeros."""
        return log_ratio.new_ones(len(log_ratio)), log_ratio.new_zeros(len(log_ratio))
