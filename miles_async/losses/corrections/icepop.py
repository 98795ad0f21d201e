"""IcePop: tokens on which the two policies disagree are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from miles_async.losses.corrections.correction import Correction
from miles_async.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Icepop(Correction):
    """The ratio of each token inside icepop_band, and 0 outside it.

    Source: IcePop, Ling Team 2025 (arXiv 2510.18855), section 3.
    """

    name = "icepop"

    class Settings(Section):
        """The band of ratios."""

        icepop_band: tuple[float, float] = (0.5, 5.0)
        """Range [low, high] of importance ratios that off_policy_correction icepop trains on. Tokens outside this range
        are excluded from the loss."""

    def problems(self, settings: Settings) -> Iterator[str]:
        """Whether the band contains the ratio of tokens that are on-policy."""
        low, high = settings.icepop_band
        if not 0 <= low < 1 < high:
            yield f"icepop_band [{low:g}, {high:g}] does not contain the ratio 1; set it to [0.5, 5], for example"

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """r if it is in the band, otherwise 0."""
        low, high = settings.icepop_band
        ratio = log_ratio.exp()
        masked = (ratio < low) | (ratio > high)
        return ratio.masked_fill(masked, 0.0), masked.to(ratio.dtype)
