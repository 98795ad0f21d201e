"""Decoding attention for a whole batch on CPU.

SGLang's torch-native backend calls the attention kernel once per sequence and layer; for many short sequences that is
most of a step. This calls it once per layer, on keys padded to the longest sequence, hooked around the original
(`plugin.py`). Where sequences are long the work itself dominates and the original is as fast, so it keeps those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

LONGEST = 96
"""Tokens of the longest sequence up to which one padded call was the faster one (64 sequences, one core)."""


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
    """One new token per sequence: row `i` of `query` attends to all of sequence `i`.

    `query` and `output` are [sequences, heads, width], the caches [slots, kv_heads, width], and `req_to_token`
    [requests, context] names the slot of each token.
    """
    longest = int(seq_lens.max())
    if longest > LONGEST or encoder_lens is not None or (sliding_window_size or 0) > 0:
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
            scaling=scaling, sliding_window_size=sliding_window_size, **others,
        )  # fmt: skip
    real = torch.arange(longest) < seq_lens[:, None]
    slots = req_to_token[req_pool_indices, :longest]
    # Padding repeats the sequence's own first slot: one that nobody owns may hold no number, which no mask hides.
    slots = torch.where(real, slots, slots[:, :1]).long()
    keys = k_cache[slots].transpose(1, 2).to(query.dtype)
    values = v_cache[slots].transpose(1, 2).to(query.dtype)
    # The heads that share keys stand in as queries of one head: nothing has to be repeated.
    grouped = query.view(len(seq_lens), keys.shape[1], -1, query.shape[2])
    answer = scaled_dot_product_attention(grouped, keys, values, attn_mask=real[:, None, None], scale=scaling)
    output.copy_(answer.reshape(output.shape))
    return output
