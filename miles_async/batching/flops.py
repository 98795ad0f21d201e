"""The arithmetic that training a decoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    layers: int
    hidden: int
    heads_width: int
    """Of all query heads together; `groups_width` of all heads of keys, and of values."""
    groups_width: int
    feed_forward: int
    """Width of the gated feed-forward part; of all experts that a token passes through together."""
    vocabulary: int


def training_flops(lengths: Sequence[int], sizes: LayerSizes) -> float:
    """Operations of one forward and backward pass over sequences of `lengths` tokens, causal attention.

    Two per weight and token forward, four backward; attention takes the same of queries and keys, and of weights and
    values, over the half of all pairs that it looks at.
    """
    projections = sizes.hidden * 2 * (sizes.heads_width + sizes.groups_width)
    per_token = sizes.layers * (projections + 3 * sizes.hidden * sizes.feed_forward) + sizes.hidden * sizes.vocabulary
    pairs = sum(length * length for length in lengths) / 2
    return 3.0 * (2 * per_token * sum(lengths) + 4 * sizes.layers * sizes.heads_width * pairs)
