"""Floating-point operations of a decoder-only transformer.

Training throughput (model FLOPs utilization) and the balance of work between ranks use the same arithmetic. It counts
matrix products only: norms, activations and embedding look-ups are negligible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_async.models.layers import ModelShape


def training_flops(
    lengths: Sequence[int], shape: ModelShape, *, shared: Sequence[int] | None = None, logits: int | None = None
) -> float:
    """Number of operations of one forward and one backward pass over sequences of `lengths` tokens.

    `shared` is the number of leading tokens of each sequence that were computed for another one, and `logits` the
    number of tokens that go through the output layer; by default none and all.

    The forward pass takes two operations (multiply and add) per product. Attention is causal, so half of all pairs of a
    query and a key are computed, also where a window leaves out more. The backward pass takes twice as many operations
    as the forward pass. Source: PaLM (arXiv 2204.02311), appendix B.
    """
    prefixes = [0] * len(lengths) if shared is None else shared
    tokens = sum(lengths) - sum(prefixes)
    causal_pairs = sum(length**2 - prefix**2 for length, prefix in zip(lengths, prefixes, strict=True)) / 2
    outputs = shape.hidden * shape.vocabulary * (tokens if logits is None else logits)
    return 3.0 * 2.0 * (shape.products(tokens, causal_pairs) + outputs)


def attention_crossover(shape: ModelShape) -> float:
    """Sequence length in tokens at which causal attention takes as many operations as everything else."""
    of_token = shape.products(1, 0) + shape.hidden * shape.vocabulary
    of_pair = shape.products(0, 1)
    return 2 * of_token / of_pair if of_pair else math.inf
