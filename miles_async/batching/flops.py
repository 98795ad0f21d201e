"""Floating-point operations of a decoder-only transformer.

Training throughput (model FLOPs utilization) and the balance of work between ranks use the same arithmetic. It counts
matrix products only: norms, activations and embedding look-ups are negligible.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.models.plugin import ModelShape


def layer_weights(shape: ModelShape) -> float:
    """Number of weights of the layers that one token is multiplied with: projections and active experts."""
    query_width, key_width = shape.heads * shape.head_width, shape.query_groups * shape.head_width
    # Queries and the output projection have the width of all query heads; keys and values that of the key heads.
    projections = shape.hidden * 2 * (query_width + key_width)
    # A gated feed-forward part (SwiGLU) has three matrices.
    feed_forward = 3 * shape.hidden * shape.feed_forward * shape.active_experts
    return float(shape.layers * (projections + feed_forward))


def training_flops(
    lengths: Sequence[int], shape: ModelShape, *, shared: Sequence[int] | None = None, logits: int | None = None
) -> float:
    """Number of operations of one forward and one backward pass over sequences of `lengths` tokens.

    `shared` is the number of leading tokens of each sequence that were computed for another one, and `logits` the
    number of tokens that go through the output layer; by default none and all.

    The forward pass takes two operations (multiply and add) per weight and token. Causal attention takes four per
    query-key pair and unit of head width: two for the scores and two for the weighted sum of values; half of all pairs
    are computed. The backward pass takes twice as many operations as the forward pass.
    Source: PaLM (arXiv 2204.02311), appendix B.
    """
    prefixes = [0] * len(lengths) if shared is None else shared
    tokens = sum(lengths) - sum(prefixes)
    outputs = shape.hidden * shape.vocabulary * (tokens if logits is None else logits)
    linear = 2 * (layer_weights(shape) * tokens + outputs)
    causal_pairs = sum(length**2 - prefix**2 for length, prefix in zip(lengths, prefixes, strict=True)) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_width * causal_pairs
    return 3.0 * (linear + attention)


def attention_crossover(shape: ModelShape) -> float:
    """Sequence length in tokens at which causal attention takes as many operations as all linear layers.

    From `training_flops`: `2 * weights * length == 2 * layers * query_width * length ** 2`.
    """
    weights = layer_weights(shape) + shape.hidden * shape.vocabulary
    return weights / (shape.layers * shape.heads * shape.head_width)
