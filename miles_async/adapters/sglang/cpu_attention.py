"""Decoding attention for a whole batch on CPU.

SGLang's torch-native backend calls the attention kernel once per sequence and layer. With many short sequences these
calls take most of a decoding step. This module makes one call per layer, on keys padded to the longest sequence. It is
hooked around the original function (`plugin.py`), which remains in use for long sequences: there the arithmetic
dominates and padding would waste it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_PADDED_LENGTH = 96
"""Length of the longest sequence up to which one padded call was measured to be faster (64 sequences, one core)."""


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
    """Attend with one new token per sequence: row `i` of `query` attends to all tokens of sequence `i`.

    `query` and `output` are [sequences, heads, width], `k_cache` and `v_cache` [slots, kv_heads, width]. `req_to_token`
    [requests, context] has the cache slot of each token, `req_pool_indices` [sequences] the row of each sequence.
    Writes to `output` and returns it.
    """
    longest = int(seq_lens.max())
    if longest > MAX_PADDED_LENGTH or encoder_lens is not None or (sliding_window_size or 0) > 0:
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
            scaling=scaling, sliding_window_size=sliding_window_size, **others,
        )  # fmt: skip
    is_token = torch.arange(longest) < seq_lens[:, None]
    slots = req_to_token[req_pool_indices, :longest]
    # Pad with the sequence's own first slot. An unused slot may contain NaN, and 0 * NaN would pass through the mask.
    slots = torch.where(is_token, slots, slots[:, :1]).long()
    keys = k_cache[slots].transpose(1, 2).to(query.dtype)
    values = v_cache[slots].transpose(1, 2).to(query.dtype)
    # Grouped-query attention: the query heads that share a key head become queries of one head, so that keys and values
    # need not be repeated.
    grouped = query.view(len(seq_lens), keys.shape[1], -1, query.shape[2])
    answer = scaled_dot_product_attention(grouped, keys, values, attn_mask=is_token[:, None, None], scale=scaling)
    output.copy_(answer.reshape(output.shape))
    return output
