"""What an off-policy correction provides: importance weights for tokens that another policy sampled.

The sampling policy differs because its weights are older, or because the engine rounds differently. A correction is a
subclass of `Correction` (see `miles_async/plugins.py`), which `--off-policy-correction` selects:

    [project.entry-points."miles_async.losses.corrections"]
    my_correction = "my_package:MyCorrection"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from miles_async.plugins import Kind, Plugin

if TYPE_CHECKING:
    from torch import Tensor


class Correction(Plugin):
    """How the objective of a token is weighted by the ratio between the policy before the step and the sampling one."""

    corrects: ClassVar[bool] = True
    """Whether tokens that another policy sampled are trained differently from others."""

    def weights(self, log_ratio: Tensor, sequences: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
        """Return the [m] weight of each token's objective, and [m] 1 where a bound changed the weight, else 0.

        `log_ratio` [m] is the log-probability of each token under the weights before the first optimizer step on the
        batch, minus the log-probability that the engine reported; it carries no gradient. `sequences` [m] is the
        number of the token's sequence in the micro-batch, ascending. A weight of 0 leaves the token out. `settings` is
        an instance of `Settings`.
        """
        raise NotImplementedError


CORRECTIONS = Kind("off-policy correction", Correction, "miles_async.losses.corrections")
