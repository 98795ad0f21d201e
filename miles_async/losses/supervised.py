"""The loss of supervised steps."""

from __future__ import annotations

from torch import Tensor


def supervised_loss(logprobs: Tensor, *, total_tokens: int) -> Tensor:
    """Negative log-likelihood of the micro-batch's tokens `logprobs` [n], divided by the tokens of the whole step."""
    return -logprobs.sum() / total_tokens
