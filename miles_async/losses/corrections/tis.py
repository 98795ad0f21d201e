"""Truncated importance sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from miles_async.losses.corrections.correction import Correction
from miles_async.losses.sequences import sequence_mean, sequence_sum
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
        """Upper bound of the importance weight with off_policy_correction tis, sequence or geometric."""
        tis_clip_low: float = Field(0.0, ge=0)
        """Lower bound of the importance weight with off_policy_correction tis, sequence or geometric."""

    def problems(self, settings: Settings) -> Iterator[str]:
        """Whether the lower bound is below the upper one."""
        if settings.tis_clip_low > settings.tis_clip:
            yield (
                f"tis_clip_low {settings.tis_clip_low:g} is above tis_clip {settings.tis_clip:g}: set it to a smaller "
                "value, or to 0 for no lower bound"
            )

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """r between tis_clip_low and tis_clip."""
        return _bounded(log_ratio.exp(), settings)


class SequenceTis(Tis):
    """The ratio of the whole sequence, truncated at tis_clip.

    The ratio of a sequence is unbiased but has a higher variance than that of a token.
    Source: Liu et al. 2025, "When speed kills stability".
    """

    name = "sequence"

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Tis.Settings) -> tuple[Tensor, Tensor]:
        """The product r of the ratios of a sequence's tokens, between tis_clip_low and tis_clip."""
        return _bounded(sequence_sum(log_ratio, sequences).exp(), settings)


class GeometricTis(Tis):
    """The geometric mean of the ratios of a sequence, truncated at tis_clip.

    Its size does not depend on the length of the sequence, so the bounds fit short and long ones.
    Source: the level "geometric" of slime's and Miles' examples of mismatch correction (train_infer_mismatch_helper).
    """

    name = "geometric"

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Tis.Settings) -> tuple[Tensor, Tensor]:
        """The geometric mean r of the ratios of a sequence's tokens, between tis_clip_low and tis_clip."""
        return _bounded(sequence_mean(log_ratio, sequences).exp(), settings)


def _bounded(ratio: Tensor, settings: Tis.Settings) -> tuple[Tensor, Tensor]:
    weight = ratio.clamp(settings.tis_clip_low, settings.tis_clip)
    return weight, (weight != ratio).to(ratio.dtype)
