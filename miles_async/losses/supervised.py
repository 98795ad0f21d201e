"""The losses of supervised steps."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.losses.policy import STALENESS_CLASSES, SUMS, TokenSums


def supervised_loss(logprobs: Tensor, *, total_tokens: int) -> Tensor:
    """Negative log-likelihood of the micro-batch's tokens `logprobs` [n], divided by the tokens of the whole step."""
    return -logprobs.sum() / total_tokens


def sft_loss(logprobs: Tensor, entropy: Tensor, *, total_tokens: int) -> tuple[Tensor, TokenSums]:
    """The same as a rollout's loss, with the sums that a policy loss reports: what speaks of sampling is nought.

    The metric `loss` is then the mean negative log-likelihood in nats per token.
    """
    with torch.no_grad():
        tokens = torch.tensor(float(len(logprobs)), device=logprobs.device)
        known = {
            "tokens": tokens,
            "objective": logprobs.sum(),
            "weight": tokens,
            "ratio": tokens,
            "ratio_squared": tokens,
            "entropy": entropy.sum(),
        }
        sums = logprobs.new_zeros(STALENESS_CLASSES, len(SUMS))
        sums[0] = torch.stack([known.get(name, torch.zeros_like(tokens)) for name in SUMS])
    return supervised_loss(logprobs, total_tokens=total_tokens), TokenSums(sums=sums, maximum=sums.new_zeros(1))
