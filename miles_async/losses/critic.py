"""The critic's loss of one micro-batch, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_async.losses.objectives import value_loss

CRITIC_SUMS = ("tokens", "loss", "clipped", "value", "squared_error", "return", "return_squared")


def critic_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, total_tokens: int, clip: float
) -> tuple[Tensor, Tensor]:
    """This micro-batch's share of the mean over the step's tokens, and [len(CRITIC_SUMS)] sums over its own.

    All tensors are [m]; `old_values` are from before the drain's first step, and `clip` is how far from them a value
    may move before the loss stops pulling.
    """
    per_token = value_loss(values, old_values, returns, clip)
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


def critic_metrics(sums: Tensor) -> Mapping[str, float]:
    """From `critic_loss`'s sums over the whole step; `explained_variance` is 1 for a perfect critic, 0 for a mean."""
    total = dict(zip(CRITIC_SUMS, sums.tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    spread = total["return_squared"] - total["return"] ** 2 / tokens
    return {
        "value_loss": total["loss"] / tokens,
        "value_clip_fraction": total["clipped"] / tokens,
        "value_mean": total["value"] / tokens,
        "return_mean": total["return"] / tokens,
        "explained_variance": 1 - total["squared_error"] / max(spread, 1e-12),
    }
