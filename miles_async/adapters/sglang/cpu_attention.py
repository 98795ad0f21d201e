"""Attention for whole batches on CPU.

SGLang's torch-native backend calls the attention kernel once per sequence and layer; for many short sequences that is
most of a step. These two do it once per layer, on keys padded to the longest sequence, and are hooked around its
methods (`plugin.py`). They leave to the original what they do not cover: cross-attention, sliding windows, and batches
whose lengths differ so much that padding would cost more than it saves.

Shapes: `query`, `output` [tokens, heads, width]; caches [slots, kv_heads, width]; `req_to_token` [requests, context].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

MOST_PADDING = 3
"""Padded elements per real one, above which the original is used."""


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
    enable_gqa: bool = False,
    sliding_window_size: int | None = None,
    **others: Any,
) -> torch.Tensor:
    """One new token per sequence: query row `i` attends to all of sequence `i`."""
    longest = int(seq_lens.max())
    special = encoder_lens is not None or (sliding_window_size or 0) > 0
    if special or longest * len(seq_lens) > MOST_PADDING * int(seq_lens.sum()):
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
            scaling=scaling, enable_gqa=enable_gqa, sliding_window_size=sliding_window_size, **others,
        )  # fmt: skip
    real = torch.arange(longest) < seq_lens[:, None]
    keys, values = _gather(k_cache, v_cache, req_to_token[req_pool_indices, :longest], real, query.dtype)
    # The heads that share keys stand in as queries of one head: nothing has to be repeated.
    grouped = query.view(len(seq_lens), keys.shape[1], -1, query.shape[2])
    answer = scaled_dot_product_attention(grouped, keys, values, attn_mask=real[:, None, None], scale=scaling)
    output.copy_(answer.reshape(output.shape))
    return output


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
    sliding_window_size: int | None = None,
    **others: Any,
) -> torch.Tensor:
    """Several new tokens per sequence, one sequence after the other in `query`, behind prefixes already cached."""
    longest, most_new = int(seq_lens.max()), int(extend_seq_lens.max())
    work = longest * most_new * len(seq_lens)
    special = encoder_lens is not None or not causal or (sliding_window_size or 0) > 0
    if special or work > MOST_PADDING * int((seq_lens * extend_seq_lens).sum()):
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling=scaling, enable_gqa=enable_gqa, causal=causal,
            sliding_window_size=sliding_window_size, **others,
        )  # fmt: skip
    real = torch.arange(longest) < seq_lens[:, None]
    keys, values = _gather(k_cache, v_cache, req_to_token[req_pool_indices, :longest], real, query.dtype)
    new = torch.arange(most_new) < extend_seq_lens[:, None]
    padded = query.new_zeros(len(seq_lens), most_new, *query.shape[1:])
    padded[new] = query[: int(extend_seq_lens.sum())]
    places = extend_prefix_lens[:, None] + torch.arange(most_new)
    # Padding rows look at what their sequence's last token sees: any row but an empty one will do.
    visible = torch.arange(longest) <= places.minimum(seq_lens[:, None] - 1)[:, :, None]
    grouped = padded.view(*padded.shape[:2], keys.shape[1], -1, padded.shape[3]).permute(0, 2, 3, 1, 4)
    sharing = grouped.shape[2]
    answer = scaled_dot_product_attention(
        grouped.flatten(2, 3), keys, values, attn_mask=visible.repeat(1, sharing, 1)[:, None], scale=scaling
    )
    answer = answer.unflatten(2, (sharing, most_new)).permute(0, 3, 1, 2, 4).reshape(padded.shape)
    output[: int(extend_seq_lens.sum())] = answer[new]
    return output


def _gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, real: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [sequences, kv_heads, longest, width] of `slots` [sequences, longest].

    Padding repeats the sequence's own first slot: what lies in a slot that nobody owns may be no number, and a mask
    does not stop that.
    """
    slots = torch.where(real, slots, slots[:, :1]).long()
    return k_cache[slots].transpose(1, 2).to(dtype), v_cache[slots].transpose(1, 2).to(dtype)
