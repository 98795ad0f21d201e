"""LoRA adapters on CPU: SGLang's `torch_native` backend without pinned memory, with one product per adapter.

SGLang computes one product per run of neighbouring requests with the same adapter. After a publish, or with several
adapters, requests of different adapters alternate in a batch, so there would be almost as many products as requests.
Here the rows of a batch are put in the order of their adapters, and each adapter multiplies its own rows. The functions
replace those of SGLang (`plugin.py`) and give the same results, up to rounding.

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


class Part(NamedTuple):
    """The rows of a batch, in the order of its plan, that have the same adapter."""

    rows: slice
    slot: int
    """Where the adapter is in SGLang's weight buffers."""
    rank: int
    scaling: float

    def among(self, chosen: torch.Tensor) -> Part:
        """The same for an input that has only these rows, which ascend."""
        bounds = torch.tensor([self.rows.start, self.rows.stop])
        return self._replace(rows=slice(*torch.searchsorted(chosen, bounds).tolist()))


class Order(NamedTuple):
    """The rows of a batch in the order of their adapters. Rows without an adapter are the last, and in no part."""

    rows: torch.Tensor | None
    """The row of the batch at each place; None if the batch has this order."""
    parts: list[Part]

    def sort(self, batch: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor in this order."""
        return batch if self.rows is None else batch[self.rows]

    def restore(self, ordered: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor in the order of the batch."""
        return ordered if self.rows is None else torch.empty_like(ordered).index_copy_(0, self.rows, ordered)


class BatchPlan:
    """Which rows of a batch have which adapter. SGLang keeps it as `batch_info`, and sets `has_active_lora`."""

    has_active_lora = False

    def __init__(self, by_row_count: dict[int, Order]) -> None:
        """`by_row_count` has the order of the whole batch, and of the rows that the language model head gets."""
        self._by_row_count = by_row_count

    def order(self, rows: int) -> Order:
        """The order of an input with so many rows."""
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

    def order(lengths: torch.Tensor) -> Order:
        # Requests without an adapter have a slot of rank 0.
        slots = sorted(set(weight_indices), key=lambda slot: (lora_ranks[slot] == 0, slot))
        owners = torch.tensor([slots.index(slot) for slot in weight_indices]).repeat_interleave(lengths)
        ends = torch.bincount(owners, minlength=len(slots)).cumsum(0).tolist()
        parts = [
            Part(slice(first, end), slot, lora_ranks[slot], scalings[slot])
            for slot, (first, end) in zip(slots, pairwise([0, *ends]), strict=True)
            if lora_ranks[slot] and first < end
        ]
        is_ordered = bool((owners[1:] >= owners[:-1]).all())
        return Order(None if is_ordered else owners.argsort(stable=True), parts)

    plans = [generate_sequence_lengths(forward_batch, device=torch.device("cpu"))]
    if (pruned := get_lm_head_pruned_lens(forward_batch)) is not None:
        plans.insert(0, torch.tensor(pruned))
    backend.batch_info = BatchPlan({int(lengths.sum()): order(lengths) for lengths in plans})


def shrink(inputs: torch.Tensor, weights: torch.Tensor, batch_info: BatchPlan, num_slices: int = 1) -> torch.Tensor:
    """Replace `sgemm_lora_a_fwd`: inputs (rows, features) times A (slots, slices * rank, features), scaled.

    The rows of the result are in the order of the plan.
    """
    order = batch_info.order(len(inputs))
    ordered, output = order.sort(inputs), inputs.new_zeros(len(inputs), weights.shape[1])
    for rows, slot, rank, scaling in order.parts:
        width = num_slices * rank
        output[rows, :width].addmm_(ordered[rows], weights[slot, :width].T, alpha=scaling)
    return output


def shrink_embedding(
    inputs: torch.Tensor, weights: torch.Tensor, batch_info: BatchPlan, vocab_size: int
) -> torch.Tensor:
    """Replace `sgemm_lora_a_embedding_fwd`: the columns of A (slots, rank, vocabulary) of token ids, scaled.

    The rows of the result are in the order of the plan.
    """
    order = batch_info.order(len(inputs))
    ordered, output = order.sort(inputs), weights.new_zeros(len(inputs), weights.shape[1])
    for rows, slot, rank, scaling in order.parts:
        output[rows, :rank] = scaling * weights[slot, :rank].T[ordered[rows]]
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
    order, offsets = batch_info.order(len(inputs)), slice_offsets.tolist()
    output = inputs.new_zeros(len(inputs), offsets[-1]) if base_output is None else base_output
    added = output if order.rows is None else torch.zeros_like(output)
    for rows, slot, rank, _ in order.parts:
        for number, (first, end) in enumerate(pairwise(offsets)):
            columns = inputs[rows, number * rank : (number + 1) * rank]
            added[rows, first:end].addmm_(columns, weights[slot, first:end, :rank].T)
    return output if order.rows is None else output.index_add_(0, order.rows, added)


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
    order = plan.order(len(dispatched.hidden_states))
    tokens, weights, experts = map(order.sort, (dispatched.hidden_states, *dispatched.topk_output[:2]))
    activation = _ACTIVATIONS[base.moe_runner_config.activation]
    output = torch.zeros_like(tokens)
    for expert in experts[experts >= 0].unique().tolist():  # other engine ranks have the experts below 0
        rows, choices = (experts == expert).nonzero(as_tuple=True)
        inputs, own = tokens[rows], [part.among(rows) for part in order.parts]
        gate, up = (inputs @ base.w13_weight[expert].T).chunk(2, -1)
        for part in own:
            of_a, of_b = (
                one[part.slot, expert] for one in (layer.gate_up_lora_a_weights, layer.gate_up_lora_b_weights)
            )
            matrices = zip(of_a.chunk(2), of_b.chunk(2), strict=True)
            for outputs, (a, b) in zip((gate, up), matrices, strict=True):
                outputs[part.rows].addmm_(inputs[part.rows] @ a.T, b.T)
        inputs = activation(gate) * up
        outputs = inputs @ base.w2_weight[expert].T
        for part in own:
            a, b = (one[part.slot, expert] for one in (layer.down_lora_a_weights, layer.down_lora_b_weights))
            outputs[part.rows].addmm_(inputs[part.rows] @ a.T, b.T)
        output.index_add_(0, rows, outputs * weights[rows, choices, None].to(outputs.dtype))
    restored = StandardCombineInput(hidden_states=order.restore(output))
    combined: torch.Tensor = base.dispatcher.combine(combine_input=restored)
    return combined
