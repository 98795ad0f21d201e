"""Truncated importance sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from miles_async.losses.corrections.correction import Correction
from miles_async.losses.sequences import sequence_sum
from miles_async.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Tis(Correction):
    """The ratio of each token, truncated at tis_clip.

    Source: Ionides 2008; for RL with separate engines Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training".
    """

    name = "tis"

    class Settings(Section):
        """The bound of the weight."""

        tis_clip: float = Field(2.0, gt=0)
        """Upper bound of the importance weight with off_policy_correction tis or sequence."""

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """min(r, tis_clip)."""
        return _truncated(log_ratio.exp(), settings.tis_clip)


class SequenceTis(Correction):
    """The ratio of the whole sequence, truncated at tis_clip.

    The ratio of a sequence is unbiased but has a higher variance than that of a token.
    Source: Liu et al. 2025, "When speed kills stability".
    """

    name = "sequence"
    Settings = Tis.Settings

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Tis.Settings) -> tuple[Tensor, Tensor]:
        """min(r, tis_clip), with the product r of the ratios of a sequence's tokens."""
        return _truncated(sequence_sum(log_ratio, sequences).exp(), settings.tis_clip)


def _truncated(ratio: Tensor, upper: float) -> tuple[Tensor, Tensor]:
    return ratio.clamp(max=upper), (ratio > upper).to(ratio.dtype)
