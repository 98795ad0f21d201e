"""Sums and means over the tokens of each sequence. This module does not import torch, so plug-ins can import it.

All tensors are [m], with one entry per trained token. `sequences` is the number of each token's sequence in the
micro-batch, ascending.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """[m] for every token, the mean of `values` over its sequence."""
    counts = _sums(values.new_ones(len(values)), sequences).clamp_min(1)
    return (_sums(values, sequences) / counts)[sequences]


def sequence_sum(values: Tensor, sequences: Tensor) -> Tensor:
    """[m] for every token, the sum of `values` over its sequence."""
    return _sums(values, sequences)[sequences]


def later_sum(values: Tensor, sequences: Tensor, discount: float = 1.0) -> Tensor:
    """[m] for every token, the sum of `values` over this token and all later ones of its sequence.

    The k-th later one is multiplied by `discount` ** k. The sums are computed in double precision. Each round doubles
    the number of terms in each sum, so that a GPU needs few kernels, and does not wait for any.
    """
    terms, distance = values.clone().double(), 1
    copy = terms.new_empty(len(terms))  # one for all rounds, because fresh memory is slower than the arithmetic
    while distance < len(terms) and discount:
        later = copy[:-distance].copy_(terms[distance:])
        later.masked_fill_(sequences[:-distance] != sequences[distance:], 0.0)
        terms[:-distance].add_(later, alpha=discount)
        discount, distance = discount * discount, 2 * distance
    return terms.to(values.dtype)


def at_level(log_ratio: Tensor, sequences: Tensor, level: str) -> Tensor:
    """[m] the log-ratio of each `token`, of its `sequence`, or the mean over its sequence (`geometric`)."""
    if level == "token":
        return log_ratio
    return sequence_sum(log_ratio, sequences) if level == "sequence" else sequence_mean(log_ratio, sequences)


def _sums(values: Tensor, sequences: Tensor) -> Tensor:
    """[n] sums over each of n sequences."""
    count = int(sequences[-1]) + 1 if len(sequences) else 0
    return values.new_zeros(count).index_add(0, sequences, values)
