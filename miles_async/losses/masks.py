"""Which tokens a policy update leaves out: those whose probability differs too much between two policies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from miles_async.config.schema import Algorithm
from miles_async.losses.sequences import at_level, sequence_mean, sequence_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """The masks of a run. By default nothing is left out.

    The tokens that are left out still count in the mean over tokens or samples, as in slime.
    """

    level: str | None = None
    """Whose ratio has to be in `band`: that of each token, of its sequence, or the geometric mean over the sequence."""
    band: tuple[float, float] = (0.0, math.inf)
    veto: float | None = None
    """A token with a smaller ratio excludes its sequence."""
    largest_fall: float | None = None
    """Nats per token that the mean log-probability of a sequence with a negative advantage may fall."""

    @classmethod
    def from_algorithm(cls, algorithm: Algorithm) -> TokenMasks:
        """The masks that the configuration selects."""
        return cls(
            level=algorithm.rejection_level,
            band=algorithm.rejection_band,
            veto=algorithm.rejection_veto,
            largest_fall=algorithm.opsm_delta if algorithm.use_opsm else None,
        )

    def rejected(self, log_ratio: Tensor, sequences: Tensor) -> Tensor:
        """[m] whether the policy before the step differs too much from the one that sampled.

        `log_ratio` [m] is as in `Correction.weights`.
        Source: rejection and veto of slime's and Miles' examples of mismatch correction (train_infer_mismatch_helper).
        """
        left_out = log_ratio.new_zeros(len(log_ratio)).bool()
        if self.level is not None:
            low, high = self.band
            ratio = at_level(log_ratio, sequences, self.level).exp()
            left_out = (ratio < low) | (ratio > high)
        if self.veto is not None:
            improbable = (log_ratio < math.log(self.veto)).to(log_ratio.dtype)
            left_out = left_out | (sequence_sum(improbable, sequences) > 0)
        return left_out

    def fallen(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor) -> Tensor:
        """[m] whether the token has a negative advantage, and its sequence has become much less likely.

        `logprobs` are under the weights being trained, `old_logprobs` under those before the first optimizer step on
        the batch.
        Source: off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, section 3.1), with slime's policies.
        """
        if self.largest_fall is None:
            return advantages.new_zeros(len(advantages)).bool()
        fall = sequence_mean(old_logprobs - logprobs.detach(), sequences)
        return (advantages < 0) & (fall > self.largest_fall)


NO_MASKS = TokenMasks()
