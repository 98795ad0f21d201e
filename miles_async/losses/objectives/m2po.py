"""M2PO: a budget for the second moment of the log-ratios."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from miles_async.losses.objectives.objective import Objective, PolicyTokens, StepTokens
from miles_async.section import Section

if TYPE_CHECKING:
    from torch import Tensor


class M2po(Objective):
    """Limits the second moment of an optimizer step's log-ratios to the policy that sampled, so it needs
    off_policy_correction none (arXiv 2510.01161)."""

    name = "m2po"
    paper = "arXiv 2510.01161"
    corrects = True
    scales_with_advantage = True
    # The budget holds for the whole step, and earlier steps on the batch have moved the policy.
    reads_step = True

    class Settings(Section):
        """The budget of the second moment."""

        m2po_budget: float = Field(0.04, gt=0)
        """Largest mean square of log-ratios in an optimizer step with policy_objective m2po, over the tokens that moved
        in the direction of their advantage. Their ratios are clipped at the bound that brings the mean down to this
        budget."""

    def prepare_step(self, tokens: StepTokens, settings: Settings) -> float:
        """The log-ratio at which this step is clipped."""
        log_ratios = tokens.logprobs - tokens.rollout_log_probs
        return second_moment_bound(log_ratios, tokens.advantages, settings.m2po_budget)

    def compute(self, tokens: PolicyTokens, settings: Settings) -> tuple[Tensor, Tensor]:
        """r A with r = p / q for the sampling policy q, and 1 where the clip at the step's bound removed the gradient.

        As in PPO, only a move in the direction of the advantage is clipped: r at exp(bound) if A > 0, and at
        exp(-bound) if A < 0.
        Source: M2PO (arXiv 2510.01161).
        """
        bound: float = tokens.prepared
        log_ratio, sign = tokens.logprobs - tokens.rollout_log_probs, tokens.advantages.sign()
        clipped = sign * log_ratio > bound
        # Selected before the exponential, so that a clipped ratio cannot overflow and give NaN gradients.
        return (sign * bound).where(clipped, log_ratio).exp() * tokens.advantages, clipped.to(log_ratio.dtype)


def second_moment_bound(log_ratios: Tensor, advantages: Tensor, budget: float) -> float:
    """Absolute log-ratio at which M2PO clips the tokens of an optimizer step; infinity if the budget needs no clip.

    `log_ratios` [n] and `advantages` [n] are those of all tokens of the step. Only tokens that have moved in the
    direction of their advantage count: A > 0 and r > 1, or A < 0 and r < 1. The bound makes the mean square of their
    log-ratios, each limited to the bound, equal to `budget`. The order of the tokens does not matter.
    Source: M2PO (arXiv 2510.01161) as its authors implemented it (Infini-AI-Lab/M2PO, `kpo_clip_harmful_tokens`).
    Algorithm 1 of the paper leaves out the largest tokens until the mean of the others is within the budget. The
    authors' code, and this function, limit them to the bound and keep counting them, so fewer tokens remain.
    """
    squares = log_ratios[log_ratios * advantages.sign() > 0].double().square().sort().values
    total = len(squares) * budget
    if squares.sum() <= total:
        return math.inf
    sums = squares.cumsum(0)
    # The sum of all squares if they were limited to each of them in turn. It grows, so the bound lies just before the
    # first one that exceeds the budget.
    larger = len(squares) - squares.new_ones(len(squares)).cumsum(0)
    kept = int((sums + squares * larger < total).sum())
    below = sums[kept - 1].item() if kept else 0.0
    return math.sqrt((total - below) / (len(squares) - kept))
