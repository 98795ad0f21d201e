"""Floating-point operations of a decoder-only transformer.

Training throughput (model FLOPs utilization) and the balance of work between ranks use the same arithmetic. It counts
matrix products only: norms, activations and embedding look-ups are negligible.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.config.model_shape import ModelShape


def linear_weights(shape: ModelShape) -> float:
    """Number of weights that one token is multiplied with: projections, active experts and the output layer."""
    query_width, key_width = shape.heads * shape.head_width, shape.query_groups * shape.head_width
    # Queries and the output projection have the width of all query heads; keys and values that of the key heads.
    projections = shape.hidden * 2 * (query_width + key_width)
    # A gated feed-forward part (SwiGLU) has three matrices.
    feed_forward = 3 * shape.hidden * shape.feed_forward * shape.active_experts
    return shape.layers * (projections + feed_forward) + shape.hidden * shape.vocabulary


def training_flops(lengths: Sequence[int], shape: ModelShape) -> float:
    """Number of operations of one forward and one backward pass over sequences of `lengths` tokens.

    The forward pass takes two operations (multiply and add) per weight and token. Causal attention takes four per
    query-key pair and unit of head width: two for the scores and two for the weighted sum of values; half of all pairs
    are computed. The backward pass takes twice as many operations as the forward pass.
    Source: PaLM (arXiv 2204.02311), appendix B.
    """
    linear = 2 * linear_weights(shape) * sum(lengths)
    causal_pairs = sum(length * length for length in lengths) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_width * causal_pairs
    return 3.0 * (linear + attention)


def attention_crossover(shape: ModelShape) -> float:
    """Sequence length in tokens at which causal attention takes as many operations as all linear layers.

    From `training_flops`: `2 * weights * length == 2 * layers * query_width * length ** 2`.
    """
    return linear_weights(shape) / (shape.layers * shape.heads * shape.head_width)
