"""The critic's side of PPO: advantages of single tokens from its values, and its loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_async.losses.sequences import later_sum

CRITIC_SUMS = ("tokens", "loss", "clipped", "value", "squared_error", "return", "return_squared")
"""Order of the sums that `critic_loss` returns."""


def generalized_advantages(
    rewards: Tensor, values: Tensor, sequences: Tensor, *, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Compute [m] advantages and [m] returns from each token's reward and the critic's value before the token.

    `sequences` [m] is the number of each token's sequence, ascending; the value after a sequence's last token is 0.
    `discount` is gamma. `decay` is lambda: 0 relies on the critic's values alone, 1 on the rewards alone.
    Source: GAE, Schulman et al. 2015 (arXiv 1506.02438), equation 16.
    """
    following = torch.zeros_like(values)
    following[:-1] = torch.where(sequences[:-1] == sequences[1:], values[1:], 0.0)
    errors = rewards + discount * following - values
    advantages = later_sum(errors, sequences, discount * decay)
    return advantages, advantages + values


def last_token_rewards(rewards: Tensor, sequences: Tensor) -> Tensor:
    """[m] `rewards` at the last token of each sequence and 0 elsewhere: a response is rewarded when it is complete."""
    is_last = torch.ones_like(sequences, dtype=torch.bool)
    is_last[:-1] = sequences[1:] != sequences[:-1]
    return torch.where(is_last, rewards, 0.0)


def critic_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_weights: Tensor, *, total_tokens: int, clip: float
) -> tuple[Tensor, Tensor]:
    """Compute a micro-batch's part of the critic's loss and its [len(CRITIC_SUMS)] sums for metrics.

    All tensors are [m]. The loss of each token is multiplied by `loss_weights` and divided by `total_tokens` of the
    whole optimizer step, so that micro-batches and ranks add up to the mean that `loss_aggregation` selects, as in the
    policy's loss. `old_values` are from before the first step on this batch; a value that has moved more than `clip`
    away from its old value gets no gradient that moves it further.
    """
    per_token = value_loss(values, old_values, returns, clip) * loss_weights
    with torch.no_grad():
        error = values - returns
        entries = (
            torch.ones_like(error),
            per_token,
            ((values - old_values).abs() > clip).to(error.dtype),
            values,
            error.square(),
            returns,
            returns.square(),
        )
        sums = torch.stack([entry.sum() for entry in entries])
    return per_token.sum() / total_tokens, sums


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, eps_clip: float) -> Tensor:
    """[m] half the larger of two squared errors: of the value, and of the value clipped around the old one.

    Source: PPO's reference implementation; Engstrom et al. 2020 (arXiv 2005.12729), section 3.
    """
    clipped = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2


def critic_metrics(sums: Tensor) -> Mapping[str, float]:
    """Compute the critic's metrics of an optimizer step from the total of `critic_loss`'s sums.

    - `value_loss`: Loss of the critic, with the mean of `--loss-aggregation`.
    - `value_clip_fraction`: Fraction of tokens whose value moved by more than `--value-clip`.
    - `value_mean`: Mean value that the critic predicts.
    - `return_mean`: Mean return. Worry if `value_mean` stays far from it: raise `--critic-lr`.
    - `explained_variance`: 1 for a perfect critic, and 0 for one that always predicts the mean return. Worry if it is
      below 0 after the first tens of batches: train the critic alone at first (`--num-critic-only-steps`).
    """
    total = dict(zip(CRITIC_SUMS, sums.tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    squared_deviations = total["return_squared"] - total["return"] ** 2 / tokens
    return {
        "value_loss": total["loss"] / tokens,
        "value_clip_fraction": total["clipped"] / tokens,
        "value_mean": total["value"] / tokens,
        "return_mean": total["return"] / tokens,
        "explained_variance": 1 - total["squared_error"] / max(squared_deviations, 1e-12),
    }
