"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from miles_async.losses.objectives.objective import Objective, PolicyTokens
from miles_async.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class Sapo(Objective):
    """Replaces the clip by a smooth gate (arXiv 2511.20347)."""

    name = "sapo"
    paper = "arXiv 2511.20347, section 3"
    aggregation = "sequence_mean"
    scales_with_advantage = True

    class Settings(Section):
        """The temperatures of the gate."""

        sapo_temperatures: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)
        """Temperatures of the gate of policy_objective sapo, for positive and for negative advantages. A higher
        temperature makes the gradient fade sooner as the ratio moves away from 1."""

    def compute(self, tokens: PolicyTokens, settings: Settings) -> tuple[Tensor, Tensor]:
        """A 4 / t sigmoid(t (r - 1)), and zeros.

        The temperature t depends on the sign of the advantage. The gradient equals that of r A at r = 1 and fades as
        the ratio moves away from 1 in either direction.
        Source: SAPO (arXiv 2511.20347), section 3.
        """
        positive, negative = tokens.ratio.new_tensor(settings.sapo_temperatures)
        temperature = positive.where(tokens.advantages > 0, negative)
        gate = (temperature * (tokens.ratio - 1)).sigmoid() * 4 / temperature
        return gate * tokens.advantages, tokens.ratio.new_zeros(len(gate))
