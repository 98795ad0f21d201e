"""GSPO: the ratio of the whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_async.losses.objectives.objective import Objective, PolicyTokens
from miles_async.losses.objectives.ppo import Ppo, clipped_objective
from miles_async.losses.sequences import sequence_mean

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(Objective):
    """Clips the ratio of the whole sequence (arXiv 2507.18071)."""

    name = "gspo"
    paper = "arXiv 2507.18071, equation 5 and section 5.1"
    aggregation = "sequence_mean"
    clip = (3e-4, 4e-4)
    ratio_of_sequence = True
    scales_with_advantage = True
    Settings = Ppo.Settings

    def compute(self, tokens: PolicyTokens, settings: Ppo.Settings) -> tuple[Tensor, Tensor]:
        """The clipped objective of PPO for the sequence's ratio."""
        ratio = sequence_ratio(tokens.logprobs, tokens.old_logprobs, tokens.sequences)
        return clipped_objective(ratio, tokens, settings.eps_clip_c)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, sequences: Tensor) -> Tensor:
    """[m] the ratio of the whole sequence's probabilities, to the power of one over its length.

    Rewards are given to whole sequences, so the ratio that is clipped belongs to the sequence too.
    Source: GSPO (arXiv 2507.18071), equation 7.
    """
    return sequence_mean(logprobs - old_logprobs, sequences).exp()
