"""Attention over packed sequences with common prefixes on GPUs, computed by torch's FlexAttention (arXiv 2412.05496).

Transformer Engine's attention takes whole sequences. FlexAttention takes any mask and skips the blocks of queries and
keys between which nothing is visible, so the prefixes of a pack are computed once, as on CPUs.

Its mask, results and gradients are tested on CPUs, where FlexAttention runs without a compiled kernel. On one H200 they
were those of plain attention. Without `--share-prefixes` a learner on GPUs keeps the attention of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.batching.shared_prefixes import Pack, visible_blocks

_BLOCK = 128
"""Queries and keys per block of the mask. The tiles of the compiled kernels divide it."""


@dataclass
class FlexSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Packed sequences with their mask; computed once per micro-batch and used by every layer."""

    mask: BlockMask | None = None
    positions: Tensor | None = None
    """[t] position of each token in its sequence, for `PositionRotary`."""


def has_gradients() -> bool:
    """Whether FlexAttention can train on this machine: its backward pass needs a GPU."""
    return not on_cpu()


def is_plain_attention(config: Any) -> bool:
    """Whether the model's attention has none of the features that only Transformer Engine's attention computes.

    Multi-token prediction counts as such a feature: its layers are outside the decoder and keep their attention.
    """
    return (
        config.window_size is None
        and config.softmax_type == "vanilla"
        and config.attention_dropout == 0
        and not config.mtp_num_layers
    )


def prefix_mask(pack: Pack, device: torch.device) -> BlockMask:
    """Mask under which each computed token attends to its sequence up to itself, including a common prefix.

    `create_block_mask` would compute it from all t x t pairs of tokens. A pack needs only the bounds of each block.
    """
    ends = pack.reader_ends()
    readers = to_device(ends.astype(np.int32), device)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < readers[key])

    some, full = (to_device(blocks, device) for blocks in visible_blocks(ends, _BLOCK))
    return BlockMask.from_kv_blocks(
        *_indices(some), *_indices(full), BLOCK_SIZE=_BLOCK, mask_mod=is_visible, seq_lengths=(len(ends), len(ends))
    )


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, n] number of true entries in each row of `blocks` [n, n], and [1, 1, n, n] columns, true ones first."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _attend(*tensors: Tensor, **options: Any) -> Any:
    """`flex_attention` by a compiled kernel."""
    # One compiled version serves many lengths. Passes without gradients, packs of a single block and models with other
    # numbers of heads, such as a critic, need further versions, more than torch's limit of 8. Beyond its limit torch
    # would compute all t x t scores; with `fullgraph` it raises an error instead. The limit is set around each call,
    # because torch's settings belong to a thread, and backward passes compute attention in other threads.
    with torch._dynamo.config.patch(recompile_limit=64):
        return _compiled()(*tensors, **options)


class FlexAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of Megatron's attention layers: causal attention over packed sequences with common prefixes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._scale = config.softmax_scale  # None means 1 / sqrt(head size), as in Megatron

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, packed_seq_params: FlexSeqParams, **_: Any
    ) -> Tensor:
        """Returns [t, 1, heads * d] from `q` [t, heads, d], `k` and `v` [t, kv heads, d]."""
        attend: Any = _attend if q.is_cuda else flex_attention
        queries, keys, values = (tokens.transpose(0, 1)[None] for tokens in (q, k, v))
        out: Tensor = attend(
            queries, keys, values, block_mask=packed_seq_params.mask, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(q.shape[0], 1, -1)


def use_flex_attention(model: Any) -> None:
    """Replace the core attention of a GPT model's layers, which has no parameters."""
    # Megatron's fused rotary kernel takes the bounds of whole sequences.
    model.config.apply_rope_fusion = False
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = FlexAttention(model.config)
