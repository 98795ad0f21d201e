"""Losses of supervised steps: the warm start before RL, and supervised fine-tuning (`--loss-type sft_loss`)."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.losses.policy import STALENESS_CLASSES, SUMS, TokenSums


def supervised_loss(logprobs: Tensor, *, total_tokens: int) -> Tensor:
    """Negative log-likelihood of a micro-batch's target tokens, divided by the tokens of the whole optimizer step.

    `logprobs` [m] are in nats.
    """
    return -logprobs.sum() / total_tokens


def sft_loss(logprobs: Tensor, entropy: Tensor, *, total_tokens: int) -> tuple[Tensor, TokenSums]:
    """Supervised loss with the same return values as `policy_loss`, so that both use one training loop.

    The metric `loss` is the mean negative log-likelihood in nats per token. Nothing was sampled, so all ratios and
    weights are 1, and clipping and staleness are 0.
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
