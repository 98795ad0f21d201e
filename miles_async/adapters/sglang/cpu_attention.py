"""Attention for a whole batch on CPU.

SGLang's torch-native backend calls the attention kernel once per sequence and layer. With many short sequences these
calls take most of a forward pass. This module puts sequences of similar length into a bucket, and makes one call per
bucket and layer, on keys padded to the longest sequence of the bucket. The buckets are computed once per forward pass,
and all layers share them. The functions are hooked around those of the backend (`plugin.py`), which remain in use for
cross-attention, bidirectional attention and sliding windows.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

SHORT = 32
"""Sequences up to this length share a bucket whatever their lengths: an additional call costs more than the padding."""
PADDING_RATIO = 1.5
"""Longest sequence of a bucket of longer sequences, relative to its shortest one."""
MAX_PADDED_KEYS = 1 << 15
"""Limit of the padded keys of a bucket, which are copied from the cache."""
MAX_SCORES = 1 << 22
"""Limit of queries times keys of a bucket, for which a mask may be needed."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences that attend in one call, padded to the same numbers of queries and keys."""

    sequences: int
    queries: int
    keys: int
    slots: torch.Tensor
    """[sequences * keys], the cache slot of each key."""
    rows: torch.Tensor | None
    """[sequences * queries], the row of each query; None if the bucket has all rows of the batch in their order."""
    real: torch.Tensor | None
    """The queries that are not padding, as indices of `rows`; None if all of them are real."""
    mask: torch.Tensor | None
    """[sequences, 1, queries, keys], added to the scores; None if every sequence has as many queries as keys, so that
    a causal mask is enough."""

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scaling: float | None,
    ) -> None:
        """Attend with the queries of these sequences, and write the result to their rows of `output`."""
        heads, kv_heads = query.shape[1], k_cache.shape[1]
        gathered = query if self.rows is None else query.index_select(0, self.rows)
        # `index_select` is ten times faster than indexing with a tensor.
        keys, values = (
            cache.index_select(0, self.slots)
            .view(self.sequences, self.keys, kv_heads, cache.shape[2])
            .transpose(1, 2)
            .to(query.dtype)
            for cache in (k_cache, v_cache)
        )
        answer = scaled_dot_product_attention(
            gathered.view(self.sequences, self.queries, heads, query.shape[2]).transpose(1, 2),
            keys,
            values,
            attn_mask=None if self.mask is None else self.mask.to(query.dtype),
            is_causal=self.mask is None,
            scale=scaling,
            enable_gqa=heads != kv_heads,
        )
        rows = answer.transpose(1, 2).reshape(-1, heads, values.shape[3])
        if self.rows is None:
            output.copy_(rows)
        elif self.real is None:
            output.index_copy_(0, self.rows, rows)
        else:
            output.index_copy_(0, self.rows[self.real], rows.index_select(0, self.real))


@dataclass(frozen=True, slots=True)
class Plan:
    """The buckets of a batch, which all layers share."""

    seq_lens: torch.Tensor
    """The lengths that the plan was made for, to recognise another batch."""
    buckets: tuple[Bucket, ...]


def forget_plan(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """Run after `init_forward_metadata`, at the start of every forward pass."""
    backend.forward_metadata = None


def extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Attend with the last `extend_seq_lens` tokens of each sequence; token `t` attends to tokens 0 to `t`.

    `query` and `output` are [tokens, heads, width], `k_cache` and `v_cache` [slots, kv_heads, width]. `req_to_token`
    [requests, context] has the cache slot of each token, `req_pool_indices` [sequences] the row of each sequence.
    Writes to `output` and returns it.
    """
    if encoder_lens is not None or not causal or is_cross_attn or _is_window(sliding_window_size):
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling=scaling, enable_gqa=enable_gqa, causal=causal,
            is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size,
        )  # fmt: skip
    for bucket in _buckets(backend, req_to_token, req_pool_indices, seq_lens, extend_seq_lens):
        bucket.attend(query, output, k_cache, v_cache, scaling)
    return output


def decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window_size: int | None = None,
    **others: Any,
) -> torch.Tensor:
    """Attend with the last token of each sequence; otherwise as `extend`."""
    if encoder_lens is not None or _is_window(sliding_window_size):
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
            scaling=scaling, sliding_window_size=sliding_window_size, **others,
        )  # fmt: skip
    for bucket in _buckets(backend, req_to_token, req_pool_indices, seq_lens, None):
        bucket.attend(query, output, k_cache, v_cache, scaling)
    return output


def _is_window(size: int | None) -> bool:
    return size is not None and size > -1


def _buckets(
    backend: Any,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor | None,
) -> tuple[Bucket, ...]:
    """Return the buckets of this forward pass, which its first layer makes. `extend_seq_lens` is None while decoding.

    The last `extend_seq_lens` tokens of each sequence are its queries.
    """
    plan: Plan | None = backend.forward_metadata
    if plan is None or plan.seq_lens is not seq_lens:
        lengths: list[int] = seq_lens.tolist()
        new_tokens = [1] * len(lengths) if extend_seq_lens is None else extend_seq_lens.tolist()
        buckets = tuple(
            _make_bucket(members, lengths, new_tokens, req_to_token, req_pool_indices)
            for members in divide(lengths, new_tokens)
        )
        plan = backend.forward_metadata = Plan(seq_lens, buckets)
    return plan.buckets


def divide(lengths: Sequence[int], new_tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield the members of each bucket: indices of sequences with similar numbers of queries and keys.

    Sequences without cached tokens need no mask, so they share no bucket with others.
    """
    alike: defaultdict[tuple[bool, int, int], list[int]] = defaultdict(list)
    for index, (keys, queries) in enumerate(zip(lengths, new_tokens, strict=True)):
        alike[keys == queries, _size_class(queries), _size_class(keys)].append(index)
    for members in alike.values():
        keys = max(lengths[index] for index in members)
        queries = max(new_tokens[index] for index in members)
        at_once = max(1, min(MAX_PADDED_KEYS // keys, MAX_SCORES // (keys * queries)))
        for start in range(0, len(members), at_once):
            yield members[start : start + at_once]


def _size_class(length: int) -> int:
    return 0 if length <= SHORT else math.ceil(math.log(length / SHORT, PADDING_RATIO))


def _make_bucket(
    members: Sequence[int],
    lengths: Sequence[int],
    new_tokens: Sequence[int],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
) -> Bucket:
    key_counts = torch.tensor([lengths[index] for index in members])[:, None]
    query_counts = torch.tensor([new_tokens[index] for index in members])[:, None]
    keys, queries = int(key_counts.max()), int(query_counts.max())
    key_positions, query_positions = torch.arange(keys), torch.arange(queries)

    slots = req_to_token[req_pool_indices[list(members)], :keys]
    # Pad with the sequence's own first slot. An unused slot may contain NaN, and 0 * NaN would pass through the mask.
    slots = torch.where(key_positions < key_counts, slots, slots[:, :1])

    first_rows = list(itertools.accumulate(new_tokens, initial=0))
    is_query = query_positions < query_counts
    rows = torch.tensor([first_rows[index] for index in members])[:, None] + query_positions
    rows = torch.where(is_query, rows, rows[:, :1])
    padded = not bool(is_query.all())
    whole_batch = list(members) == list(range(len(lengths)))

    mask = None
    if not torch.equal(key_counts, query_counts):
        last_key = (key_counts - query_counts + query_positions)[:, None, :, None]
        mask = torch.zeros(len(members), 1, queries, keys).masked_fill_(key_positions > last_key, -torch.inf)
    return Bucket(
        sequences=len(members),
        queries=queries,
        keys=keys,
        slots=slots.flatten(),
        rows=None if whole_batch and not padded else rows.flatten(),
        real=is_query.flatten().nonzero().flatten() if padded else None,
        mask=mask,
    )
