"""The divergence from a reference model: its estimates from sampled tokens, and sums over later tokens.

All tensors are [m], with one entry per trained token. `sequences` is the number of each token's sequence in the
micro-batch, ascending.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_async.losses.sequences import sequence_sum


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled; 0 where both agree.

    `k1`, the log-ratio, is unbiased but may be negative. `k2`, half its square, has the right gradient. `k3` is
    unbiased and never negative. Source: Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


def suffix_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """[m] for every token, the sum of `values` over this token and all later ones of its sequence."""
    # A reversed cumulative sum runs on into later sequences. What it adds there is its value at the sequence's first
    # token minus the sequence's own sum.
    running = values.flip(0).cumsum(0).flip(0)
    first = torch.searchsorted(sequences, sequences)
    return running - (running[first] - sequence_sum(values, sequences))
