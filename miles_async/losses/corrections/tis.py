"""Truncated importance sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from miles_async.losses.corrections.correction import Correction
from miles_async.losses.sequences import at_level
from miles_async.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Tis(Correction):
    """The ratio of each token, truncated at tis_clip.

    Source: Ionides 2008; for RL with separate engines Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training".
    """

    name = "tis"
    level: ClassVar[str] = "token"
    """Whose ratio is the weight, as in `at_level`."""

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
        """The ratio r of the level, between tis_clip_low and tis_clip."""
        ratio = at_level(log_ratio, sequences, self.level).exp()
        weight = ratio.clamp(settings.tis_clip_low, settings.tis_clip)
        return weight, (weight != ratio).to(ratio.dtype)


class SequenceTis(Tis):
    """The ratio of the whole sequence, which is the product over its tokens, truncated at tis_clip.

    The ratio of a sequence is unbiased but has a higher variance than that of a token.
    Source: Liu et al. 2025, "When speed kills stability".
    """

    name = "sequence"
    level = "sequence"


class GeometricTis(Tis):
    """The geometric mean of the ratios of a sequence, truncated at tis_clip.

    Its size does not depend on the length of the sequence, so the bounds fit short and long ones.
    Source: the level "geometric" of slime's and Miles' examples of mismatch correction (train_infer_mismatch_helper).
    """

    name = "geometric"
    level = "geometric"
