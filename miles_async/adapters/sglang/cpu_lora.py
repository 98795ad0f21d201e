"""LoRA adapters on CPU: SGLang's `torch_native` backend without pinned memory, with one product per adapter.

SGLang computes one product per run of neighbouring requests with the same adapter. After a publish, requests of two
versions alternate in a batch, so there would be almost as many products as requests. Here each adapter multiplies the
whole batch, and a mask removes the rows of other adapters: a few more products cost less than collecting rows. The
functions replace those of SGLang (`plugin.py`) and give the same results, up to rounding.

SGLang computes adapters of experts with Triton only, so experts are computed here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}
"""By SGLang's names."""
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

    def among(self, rows: torch.Tensor) -> Rows:
        """The same for an input that has only these rows of the batch."""
        return self if self.mask is None else self._replace(mask=self.mask[rows])


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


def compute_experts(layer: Any, hidden_states: torch.Tensor, topk_output: Any, **_: Any) -> torch.Tensor:
    """Replace `FusedMoEWithLoRA.forward`: `hidden_states` [t, h] through the chosen experts of each token.

    Each expert computes its tokens at once. SGLang has multiplied B by the scale of the adapter.
    """
    base, plan = layer.base_layer, layer.lora_backend.batch_info
    if plan is None or not plan.has_active_lora:
        result: torch.Tensor = base(hidden_states, topk_output)
        return result
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    dispatched = base.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    tokens, (weights, experts, _) = dispatched.hidden_states, dispatched.topk_output
    parts = plan.parts(len(tokens))
    activation = _ACTIVATIONS[base.moe_runner_config.activation]
    output = torch.zeros_like(tokens)
    for expert in experts[experts >= 0].unique().tolist():  # other engine ranks have the experts below 0
        rows, choices = (experts == expert).nonzero(as_tuple=True)
        inputs, own = tokens[rows], [part.among(rows) for part in parts]
        gate, up = (inputs @ base.w13_weight[expert].T).chunk(2, -1)
        for part in own:
            of_a, of_b = (
                one[part.slot, expert] for one in (layer.gate_up_lora_a_weights, layer.gate_up_lora_b_weights)
            )
            matrices = zip(of_a.chunk(2), of_b.chunk(2), strict=True)
            for outputs, (a, b) in zip((gate, up), matrices, strict=True):
                outputs.addmm_(part.of(inputs @ a.T), b.T)
        inputs = activation(gate) * up
        outputs = inputs @ base.w2_weight[expert].T
        for part in own:
            a, b = (one[part.slot, expert] for one in (layer.down_lora_a_weights, layer.down_lora_b_weights))
            outputs.addmm_(part.of(inputs @ a.T), b.T)
        output.index_add_(0, rows, outputs * weights[rows, choices, None].to(outputs.dtype))
    combined: torch.Tensor = base.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=output))
    return combined


def _mask(rows: torch.Tensor) -> torch.Tensor | None:
    return None if rows.all() else rows[:, None]
