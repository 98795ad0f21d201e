"""The policy-gradient loss of one micro-batch, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles_async.losses.correction import CorrectionSettings, importance_weights
from miles_async.losses.objectives import cispo_objective, clipped_objective, kl_penalty, sequence_ratio, suffix_sum

Objective = Literal["token_clip", "sequence_clip", "cispo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    objective: Objective
    """Clip the ratio of a token (PPO), of its sequence (GSPO), or the weight and not the gradient (CISPO)."""
    eps_clip: float
    eps_clip_high: float
    correction: CorrectionSettings
    entropy_coef: float
    kl_loss_coef: float
    """Weight of the distance from the reference model in the loss; `kl_reward_coef` that in the reward."""
    kl_reward_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """[n], one entry per token to train; those under a loss mask of 0 were left out before."""

    old_logprobs: Tensor
    """Under the weights before the drain's first step."""
    rollout_log_probs: Tensor
    """As the engines reported them."""
    advantages: Tensor
    loss_weights: Tensor
    """How much the token counts in the sum; all ones make a mean over tokens."""
    sequences: Tensor
    """The number of the token's sequence in the micro-batch, rising."""
    staleness: Tensor
    """Trainer version minus the version that sampled the token."""
    reference_logprobs: Tensor | None = None
    """Under the frozen reference model, where one is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Sums over the trained tokens of a micro-batch; those of several micro-batches and ranks add up (maxima: max)."""

    sums: Tensor
    """[STALENESS_CLASSES, len(SUMS)]: row i of the tokens i versions old, the last row of all that are older."""
    maximum: Tensor
    """[1], the largest absolute gap between train and rollout log-probability."""


SUMS = ("tokens", "objective", "clipped", "bounded", "weight", "ratio", "ratio_squared", "gap", "entropy", "kl")
STALENESS_CLASSES = 5


def policy_loss(
    logprobs: Tensor, entropy: Tensor, columns: TokenColumns, *, total_tokens: int, settings: PolicyLossSettings
) -> tuple[Tensor, TokenSums]:
    """This micro-batch's share of the loss: its weighted token sum divided by the tokens of the whole optimizer step.

    `logprobs` and `entropy` [n] are under the weights being trained. Summed over micro-batches and ranks the result
    does not depend on the grouping into micro-batches, whatever the aggregation: that lies in `columns.loss_weights`.
    """
    old, advantages = columns.old_logprobs.detach(), columns.advantages
    if columns.reference_logprobs is not None and settings.kl_reward_coef:
        away = kl_penalty(old, columns.reference_logprobs, settings.kl_estimator)
        advantages = advantages - settings.kl_reward_coef * suffix_sum(away, columns.sequences)
    low, high = settings.eps_clip, settings.eps_clip_high
    if settings.objective == "sequence_clip":
        objective, clipped = clipped_objective(sequence_ratio(logprobs, old, columns.sequences), advantages, low, high)
    elif settings.objective == "cispo":
        objective, clipped = cispo_objective(logprobs, (logprobs - old).exp(), advantages, low, high)
    else:
        objective, clipped = clipped_objective((logprobs - old).exp(), advantages, low, high)
    gap = old - columns.rollout_log_probs
    weight, bounded = importance_weights(gap, columns.sequences, settings.correction)
    per_token = weight * objective + settings.entropy_coef * entropy
    kl = torch.zeros_like(gap)
    if columns.reference_logprobs is not None:
        kl = kl_penalty(logprobs, columns.reference_logprobs, settings.kl_estimator)
        per_token = per_token - settings.kl_loss_coef * kl
    per_token = per_token * columns.loss_weights
    loss = -per_token.sum() / total_tokens
    with torch.no_grad():
        # Overflow to infinity is for the loss to report, not for its metrics: a gap of 20 is off the scale anyway.
        ratio = gap.clamp(-20, 20).exp()
        entries = (torch.ones_like(gap), per_token, clipped, bounded, weight, ratio, ratio.square(), gap.abs())
        stacked = torch.stack([*entries, entropy, kl], 1)
        classes = columns.staleness.clamp(0, STALENESS_CLASSES - 1)
        sums = stacked.new_zeros(STALENESS_CLASSES, len(SUMS)).index_add(0, classes, stacked)
        maximum = torch.cat([gap.abs(), gap.new_zeros(1)]).amax(0, keepdim=True)
    return loss, TokenSums(sums=sums, maximum=maximum)


def objective_sum(sums: Tensor) -> float:
    """Not finite where the loss was not."""
    return float(sums[:, SUMS.index("objective")].sum())


def policy_metrics(sums: Tensor, maximum: Tensor) -> Mapping[str, float]:
    """Metrics of an optimizer step from its `TokenSums`, added up over micro-batches and ranks.

    `ess` is the effective sample size of the unbounded importance ratios as a share of the tokens (Kish 1965): 1 is
    on-policy. What depends on staleness comes again for each staleness that was there, as `ess_staleness_2`.
    """
    total = dict(zip(SUMS, sums.sum(0).tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    metrics = {
        "loss": -total["objective"] / tokens,
        **_off_policy(total),
        "logprob_gap_max": maximum.item(),
        "importance_weight": total["weight"] / tokens,
        "entropy": total["entropy"] / tokens,
        "kl": total["kl"] / tokens,
        "loss_tokens": total["tokens"],
    }
    for staleness, row in enumerate(sums.tolist()):
        if row[0]:
            own = dict(zip(SUMS, row, strict=True))
            name = f"{staleness}_or_more" if staleness == STALENESS_CLASSES - 1 else str(staleness)
            metrics |= {f"{metric}_staleness_{name}": value for metric, value in _off_policy(own).items()}
            metrics[f"token_share_staleness_{name}"] = own["tokens"] / tokens
    return metrics


def _off_policy(total: Mapping[str, float]) -> dict[str, float]:
    tokens = max(total["tokens"], 1.0)
    return {
        "ess": total["ratio"] ** 2 / max(tokens * total["ratio_squared"], 1e-30),
        "clip_fraction": total["clipped"] / tokens,
        "bounded_fraction": total["bounded"] / tokens,
        "logprob_gap_mean": total["gap"] / tokens,
    }
