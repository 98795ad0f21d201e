"""Core attention on CPUs, in the slot that Megatron's layer spec has for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_LONG = 256
"""Tokens from which on padding costs more than a call of its own."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, laid out as rows."""

    rows: Tensor
    """[n * longest] place in the pack of every cell; cells past a sequence's end repeat its last token."""
    count: int
    longest: int
    kept: Tensor | None
    """Places of the cells that are tokens, in the order of `rows`; None where all are."""


@dataclass
class BucketedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Packed sequences and how CPU attention lays them out; made once per micro-batch, used by every layer."""

    buckets: list[Bucket] = field(default_factory=list)
    restore: Tensor | None = None
    """Puts the tokens of all buckets, one bucket after the other, back into the order of the pack."""


def packed_params(lengths: NDArray[np.int64], device: torch.device) -> PackedSeqParams:
    """How the sequences of a pack lie, for Megatron's `thd` attention."""
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    longest = int(lengths.max())
    layout: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    if device.type != "cpu":
        return PackedSeqParams(**layout)
    buckets, restore = bucketed(lengths)
    return BucketedSeqParams(**layout, buckets=buckets, restore=restore)


def bucketed(lengths: NDArray[np.int64]) -> tuple[list[Bucket], Tensor | None]:
    """Short sequences by the power of two that holds them, each bucket padded to its longest; long ones by themselves.

    Padding at most doubles a bucket's tokens, and is exact: causal attention never looks at what follows. Measured on
    one core, forward and backward, against one call to SDPA per sequence: 512 sequences of 12 to 15 tokens take a
    tenth of the time in buckets, 8 of 300 to 1000 tokens twice the time; one block-diagonal mask is slower still.
    """
    starts = np.cumsum(lengths) - lengths
    buckets, order = [], []
    sizes = np.where(lengths > _LONG, -1 - np.arange(len(lengths)), np.ceil(np.log2(lengths)))
    for size in np.unique(sizes):
        chosen = np.flatnonzero(sizes == size)
        longest = int(lengths[chosen].max())
        cells = np.arange(longest)[None, :]
        rows = (starts[chosen, None] + np.minimum(cells, lengths[chosen, None] - 1)).reshape(-1)
        kept = np.flatnonzero((cells < lengths[chosen, None]).reshape(-1))
        order.append(rows[kept])
        full = len(kept) == len(rows)
        buckets.append(Bucket(torch.from_numpy(rows), len(chosen), longest, None if full else torch.from_numpy(kept)))
    restore = np.argsort(np.concatenate(order))
    in_order = bool((restore == np.arange(len(restore))).all())
    return buckets, None if in_order else torch.from_numpy(restore)


class CpuAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's SDPA over a pack, bucket by bucket."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, packed_seq_params: BucketedSeqParams, **_: Any
    ) -> Tensor:
        """`q` [T, heads, d], `k` and `v` [T, kv heads, d] to [T, 1, heads * d]."""
        parts = [_attend(q, k, v, bucket) for bucket in packed_seq_params.buckets]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if packed_seq_params.restore is not None:
            out = out.index_select(0, packed_seq_params.restore)
        return out.reshape(q.shape[0], 1, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket) -> Tensor:
    shape = (bucket.count, bucket.longest)
    rows = (t.index_select(0, bucket.rows).view(*shape, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    out = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
    return out if bucket.kept is None else out.index_select(0, bucket.kept)
