"""LoRA adapters on CPU: SGLang's `torch_native` backend without pinned memory, with one product per adapter.

SGLang computes one product per run of neighbouring requests with the same adapter. After a publish, requests of two
versions alternate in a batch, so there would be almost as many products as requests. Here each adapter multiplies the
whole batch, and a mask removes the rows of other adapters: a few more products cost less than collecting rows. The
functions replace those of SGLang (`plugin.py`) and give the same results, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

ForwardBatch = Any
"""`sglang.srt.model_executor.forward_batch_info.ForwardBatch`, which takes seconds to import."""


class Rows(NamedTuple):
    """The rows of a batch that have the same adapter."""

    mask: torch.Tensor | None
    """Which rows have the adapter, as a column; None if all of them have it."""
    slot: int
    """Where the adapter is in SGLang's weight buffers."""
    rank: int
    scaling: float

    def of(self, products: torch.Tensor) -> torch.Tensor:
        """`products`, with zeros in the rows of other adapters."""
        return products if self.mask is None else products.where(self.mask, 0.0)


class BatchPlan:
    """Which rows of a batch have which adapter. SGLang keeps it as `batch_info`, and sets `has_active_lora`."""

    has_active_lora = False

    def __init__(self, by_row_count: dict[int, list[Rows]]) -> None:
        """`by_row_count` has the parts of the whole batch, and of the rows that the language model head gets."""
        self._by_row_count = by_row_count

    def parts(self, rows: int) -> list[Rows]:
        """The parts of an input with so many rows. Rows without an adapter are in no part."""
        return self._by_row_count[rows]


def unpin() -> None:
    """Let SGLang's requests for pinned memory, which needs a GPU, return ordinary memory."""
    tensor = torch.tensor

    def unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return tensor(*arguments, **options)

    torch.tensor = unpinned
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def prepare_batch(
    backend: Any,
    forward_batch: ForwardBatch,
    weight_indices: Sequence[int],
    lora_ranks: Sequence[int],
    scalings: Sequence[float],
    use_cuda_graph: bool,
    use_prefill_cuda_graph: bool = False,
) -> None:
    """Replace `TorchNativeLoRABackend.prepare_lora_batch`. `weight_indices` has a slot per request."""
    from sglang.srt.lora.utils import generate_sequence_lengths, get_lm_head_pruned_lens

    def parts(lengths: torch.Tensor) -> list[Rows]:
        owners = torch.tensor(weight_indices).repeat_interleave(lengths)
        slots = [slot for slot in sorted(set(weight_indices)) if lora_ranks[slot]]
        return [Rows(_mask(owners == slot), slot, lora_ranks[slot], scalings[slot]) for slot in slots]

    plans = [generate_sequence_lengths(forward_batch, device=torch.device("cpu"))]
    if (pruned := get_lm_head_pruned_lens(forward_batch)) is not None:
        plans.insert(0, torch.tensor(pruned))
    backend.batch_info = BatchPlan({int(lengths.sum()): parts(lengths) for lengths in plans})


def shrink(inputs: torch.Tensor, weights: torch.Tensor, batch_info: BatchPlan, num_slices: int = 1) -> torch.Tensor:
    """Replace `sgemm_lora_a_fwd`: inputs (rows, features) times A (slots, slices * rank, features), scaled."""
    output = inputs.new_zeros(len(inputs), weights.shape[1])
    for part in batch_info.parts(len(inputs)):
        width = num_slices * part.rank
        output[:, :width].add_(part.of(inputs @ weights[part.slot, :width].T), alpha=part.scaling)
    return output


def shrink_embedding(
    inputs: torch.Tensor, weights: torch.Tensor, batch_info: BatchPlan, vocab_size: int
) -> torch.Tensor:
    """Replace `sgemm_lora_a_embedding_fwd`: the columns of A (slots, rank, vocabulary) of token ids, scaled."""
    output = weights.new_zeros(len(inputs), weights.shape[1])
    for part in batch_info.parts(len(inputs)):
        columns = weights[part.slot, : part.rank].T[inputs]
        output[:, : part.rank].add_(part.of(columns), alpha=part.scaling)
    return output


def expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    batch_info: BatchPlan,
    slice_offsets: torch.Tensor,
    base_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replace `sgemm_lora_b_fwd`: add the result of `shrink` times B (slots, outputs, rank) to `base_output`.

    The outputs of slice i are those from `slice_offsets[i]` to `slice_offsets[i + 1]`.
    """
    offsets = slice_offsets.tolist()
    output = inputs.new_zeros(len(inputs), offsets[-1]) if base_output is None else base_output
    for part in batch_info.parts(len(inputs)):
        rows = part.of(inputs)
        for number, (first, end) in enumerate(pairwise(offsets)):
            columns = rows[:, number * part.rank : (number + 1) * part.rank]
            output[:, first:end].addmm_(columns, weights[part.slot, first:end, : part.rank].T)
    return output


def _mask(rows: torch.Tensor) -> torch.Tensor | None:
    return None if rows.all() else rows[:, None]
