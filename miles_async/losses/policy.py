"""The policy-gradient loss of one micro-batch, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    eps_clip: float
    eps_clip_high: float
    tis_clip: float | None
    """Upper bound of the importance weight; None applies no correction."""
    entropy_coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Sums over the trained tokens of a micro-batch; those of several micro-batches and ranks add up (maxima: max)."""

    sums: Tensor
    """[8] in the order of `SUMS`."""
    maximum: Tensor
    """[1], the largest absolute gap between train and rollout log-probability."""


SUMS = ("tokens", "objective", "clipped", "weight", "ratio", "ratio_squared", "gap", "entropy")


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    total_tokens: int,
    settings: PolicyLossSettings,
) -> tuple[Tensor, TokenSums]:
    """This micro-batch's share of the loss: its token sum divided by the tokens of the whole optimizer step.

    All tensors are [n], one entry per token to train (those under a loss mask of 0 were left out before):
    `logprobs` and `entropy` under the weights being trained, `old_logprobs` under the weights before the drain's
    first step, `rollout_logprobs` as the engines reported them, `advantages` of the token's sample. Summed over
    micro-batches and ranks the result is one mean over tokens, so the grouping into micro-batches changes nothing and
    long answers are not discounted (DAPO, arXiv 2503.14476, section 3.3, also the source of a higher upper clip,
    section 3.1).
    """
    old_logprobs = old_logprobs.detach()
    ratio = (logprobs - old_logprobs).exp()
    objective, clipped = clipped_objective(ratio, advantages, settings.eps_clip, settings.eps_clip_high)
    mismatch = (old_logprobs - rollout_logprobs).exp()
    weight = truncated_importance(mismatch, settings.tis_clip)
    per_token = weight * objective + settings.entropy_coef * entropy
    loss = -per_token.sum() / total_tokens
    with torch.no_grad():
        gap = (old_logprobs - rollout_logprobs).abs()
        # Overflow to infinity is for the loss to report, not for its metrics: a gap of 20 is off the scale anyway.
        ratios = (old_logprobs - rollout_logprobs).clamp(-20, 20).exp()
        columns = (torch.ones_like(gap), per_token, clipped, weight, ratios, ratios.square(), gap, entropy)
        sums = torch.stack([column.sum() for column in columns])
        maximum = torch.cat([gap, gap.new_zeros(1)]).amax(0, keepdim=True)
    return loss, TokenSums(sums=sums, maximum=maximum)


def clipped_objective(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), and 1 where the clip cut the gradient.

    Source: PPO, Schulman et al. 2017 (arXiv 1707.06347), equation 7.
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return torch.minimum(free, bounded), (bounded < free).to(ratio.dtype)


def truncated_importance(ratio: Tensor, upper: float | None) -> Tensor:
    """min(pi_train / pi_rollout, upper), without gradient; all ones where `upper` is None.

    Corrects, token by token, for tokens sampled under older weights and by an engine that rounds otherwise.
    Source: truncated importance sampling, Ionides 2008; for RL with separate engines: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training".
    """
    return torch.ones_like(ratio) if upper is None else ratio.detach().clamp(max=upper)


def metrics_from(sums: Tensor, maximum: Tensor) -> Mapping[str, float]:
    """Metrics of an optimizer step from its `TokenSums`, added up over micro-batches and ranks.

    `ess` is the effective sample size of the untruncated importance ratios as a share of the tokens (Kish 1965):
    1 is on-policy.
    """
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    return {
        "loss": -total["objective"] / tokens,
        "clip_fraction": total["clipped"] / tokens,
        "tis_weight": total["weight"] / tokens,
        "ess": total["ratio"] ** 2 / max(tokens * total["ratio_squared"], 1e-30),
        "logprob_gap_mean": total["gap"] / tokens,
        "logprob_gap_max": maximum.item(),
        "entropy": total["entropy"] / tokens,
        "loss_tokens": total["tokens"],
    }
