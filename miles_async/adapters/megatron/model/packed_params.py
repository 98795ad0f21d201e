"""Packed sequences as Megatron's attention and rotary embedding take them, on CPUs and GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from miles_async.adapters.megatron.model import flex_attention
from miles_async.adapters.megatron.model.flex_attention import FlexSeqParams
from miles_async.adapters.megatron.model.host_memory import to_device
from miles_async.adapters.megatron.model.local_layers import BucketedSeqParams, bucket_sequences
from miles_async.batching.shared_prefixes import Pack


def packed_params(
    pack: Pack, device: torch.device, positions: Tensor | None, *, local: bool, shares_prefixes: bool
) -> PackedSeqParams:
    """Describe packed sequences for Megatron's `thd` attention.

    `positions` [t] of this rank's tokens are given if the model's rotary embedding is a `PositionRotary`. `local` is
    true if the model has the layers of `local_layers.py`. The attention of a model that shares prefixes on a GPU is
    `FlexAttention`.
    """
    lengths = pack.lengths
    bounds = to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)
    longest = int(lengths.max())
    layout: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if "seq_idx" in PackedSeqParams.__dataclass_fields__:
        # State space models need the number of each token's sequence; older versions of Megatron have none.
        numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        layout["seq_idx"] = torch.from_numpy(numbers)[None].to(device)
    group = parallel_state.get_context_parallel_group()
    if positions is not None:
        # Without bounds Megatron multiplies all tokens with the angles of `PositionRotary` at once. With bounds it
        # would cut the pack into its sequences, in every layer.
        layout |= {"cu_seqlens_q": None, "cu_seqlens_kv": None}
        if shares_prefixes and flex_attention.has_gradients():
            return FlexSeqParams(**layout, mask=flex_attention.prefix_mask(pack, device), positions=positions)
    if not local:
        # With context parallelism Transformer Engine asks for the padded bounds too. They are the same here: padding
        # is part of each sequence's length.
        padded = {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds} if group.size() > 1 else {}
        return PackedSeqParams(**layout, **padded)
    buckets, restore = bucket_sequences(pack, device, group.size(), group.rank())
    return BucketedSeqParams(**layout, buckets=buckets, restore=restore, positions=positions)


class PositionRotary(torch.nn.Module):
    """Replaces the rotary embedding of a GPT model and has its call signature: angles by token, not by sequence.

    With a shared prefix the positions of a pack do not follow from the bounds of its sequences. Angles by token also
    save Megatron from cutting the pack into sequences, for queries and keys of every layer.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._rotary = rotary

    def get_rotary_seq_len(
        self,
        context: None,
        transformer: Any,
        hidden: Any,
        config: Any,
        packed_seq_params: BucketedSeqParams | FlexSeqParams,
    ) -> tuple[int, Tensor | None]:
        """Returns the arguments of `forward`; Megatron passes them on."""
        return packed_seq_params.max_seqlen_q, packed_seq_params.positions

    def forward(self, arguments: tuple[int, Tensor], **_: Any) -> Tensor:
        """Returns [t, 1, d] angles of the tokens at the given positions, which are below the first argument."""
        longest, positions = arguments
        # Megatron caches 32 lengths; powers of two need no more.
        angles: Tensor = self._rotary(1 << (longest - 1).bit_length(), packed_seq=True)
        return angles[:, 0].index_select(0, positions)
