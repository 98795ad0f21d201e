"""What takes the place of a GPT model's output layer: logits of chosen tokens, or the values of a critic.

`OutputLayer` computes logits only of the tokens whose logits a loss reads, a part of them at a time.

Most logits of a training step are never read: those of prompts, of tool output and of padding. And a [tokens,
vocabulary] tensor in float32 is the largest of the step: 150 MB for 768 tokens and a vocabulary of 49,152.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from miles_async.adapters.megatron.model.lora import HeadAdapter, adapters_of

CHUNK_ENTRIES = 2**23
"""Most logits of a chunk on a CPU: 32 MiB in float32."""
GPU_FRACTION = 1 / 24
"""Part of a GPU's memory that the logits of a chunk take at most: 3.3 of 80 GiB, or 11,000 tokens of a vocabulary of
152k in bfloat16. The memory that is free just then would be no good measure. It differs between runs and between
tensor-parallel ranks, which must use the same chunks, and gradients would be rounded differently each time."""


class OutputLayer:
    """Replaces the call of a GPT model's output layer, so that the model returns hidden states.

    `map` computes the logits of chosen tokens afterwards. The parameters stay in the model.
    """

    def __init__(self, model: Any, chunk_entries: int | None = None) -> None:
        """`model` is the last pipeline stage of a GPT model.

        `chunk_entries` is the most logits of a chunk; by default it follows the memory of the device. All
        tensor-parallel ranks must create the layer at the same time.
        """
        self._layer = model.output_layer
        self._compute = self._layer.forward
        self._shared_weight = (
            model.shared_embedding_or_output_weight if model.share_embeddings_and_output_weights else None
        )
        self._adapter = next((one for one in adapters_of([self._layer]) if isinstance(one, HeadAdapter)), None)
        self._dtype = model.config.params_dtype
        self._sequence_parallel = self._layer.sequence_parallel
        if self._sequence_parallel:
            # `map` gathers the hidden states, so the layer itself gets whole rows and adds up their gradients.
            self._layer.sequence_parallel = False
            self._layer.allreduce_dgrad = True
        # Megatron's fused kernel, which is Apex's, looks for the buffer of gradients on the weight that it is given.
        # The backward pass of a chunk gives it a detached one.
        self._layer.gradient_accumulation_fusion = False
        self._layer.forward = _return_input
        self.columns = self._layer.output_size_per_partition
        """This rank's part of the (padded) vocabulary."""
        device = next(model.parameters()).device
        self.chunk_entries = _default_entries(device, self._dtype) if chunk_entries is None else chunk_entries

    def map(
        self,
        output: Tensor,
        rows: Tensor,
        read: Callable[[Tensor, slice], tuple[Tensor, ...]],
        *,
        trains_weight: bool = True,
    ) -> tuple[Tensor, ...]:
        """Apply `read(logits, chunk)` to the logits of all `rows`, chunk by chunk, and concatenate the results.

        `output` [t, h] is the model's output, `rows` [k] are indices of whole sequences' tokens, and `logits` are those
        of `rows[chunk]`, in the precision of the weights. `read` returns tensors whose last dimension is that of the
        chunk. The backward pass computes the logits of a chunk again if there are several chunks, so no logits outlive
        their chunk. Without `trains_weight` the weight of the layer gets no gradient.
        """
        if self._sequence_parallel:
            # All tensor-parallel ranks go on to compute the same loss, so each takes its slice of the gradient.
            group = parallel_state.get_tensor_model_parallel_group()
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=group)
        # Megatron returns a model's output in float32, whatever the precision of its weights.
        hidden = output.index_select(0, rows).to(self._dtype)
        whole = self._layer.weight if self._shared_weight is None else self._shared_weight()
        if not trains_weight:
            whole = whole.detach()

        def compute(part: Tensor, weight: Tensor, chunk: slice) -> tuple[Tensor, ...]:
            logits, _ = self._compute(part[:, None], weight=weight)
            return read(logits.squeeze(1), chunk)

        def compute_adapted(part: Tensor, of_b: Tensor, chunk: slice) -> tuple[Tensor, ...]:
            inputs, shrunk = part.split([output.shape[-1], of_b.shape[-1]], -1)
            logits, _ = self._compute(inputs[:, None].contiguous(), weight=whole)
            return read(torch.addmm(logits.squeeze(1), shrunk, of_b.to(part.dtype).T), chunk)

        if self._adapter is None or not self._adapter.enabled:
            return self._map(hidden, whole, compute)
        # The trained matrix takes the place of the weight, which is frozen.
        hidden = torch.cat([hidden, self._adapter.shrink(hidden)], -1)
        return self._map(hidden, self._adapter.b[0], compute_adapted)

    def _map(
        self, hidden: Tensor, weight: Tensor, compute: Callable[[Tensor, Tensor, slice], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Apply `compute(hidden[chunk], weight, chunk)` to all chunks, and concatenate the results."""
        most = max(1, self.chunk_entries // self.columns)
        if len(hidden) <= most:
            return compute(hidden, weight, slice(0, len(hidden)))
        size = -(-len(hidden) // -(-len(hidden) // most))
        results: tuple[Tensor, ...] = _InChunks.apply(hidden, weight, compute, size)  # type: ignore[no-untyped-call]
        return results


class _InChunks(torch.autograd.Function):
    """`compute(hidden[chunk], weight, chunk)` of chunks of `size` rows, concatenated along the last dimension.

    The backward pass computes each chunk again. It adds up the gradients of the weights in float32, in Megatron's
    buffer if that is in float32. Autograd would add them in the precision of the weights: with 168 chunks in bfloat16
    this loses 1 % of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, compute: Callable[..., tuple[Tensor, ...]], size: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden)
        # Megatron's buffer is an attribute of the parameter, which a saved tensor would lose.
        ctx.weight, ctx.compute, ctx.size = weight, compute, size
        ctx.set_materialize_grads(False)
        results = [compute(hidden[chunk], weight, chunk) for chunk in _chunks(hidden, size)]
        return tuple(torch.cat(parts, -1) for parts in zip(*results, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        (hidden,), weight = ctx.saved_tensors, ctx.weight
        hidden_gradient = torch.empty_like(hidden)
        is_trained = weight.requires_grad
        has_buffer = hasattr(weight, "main_grad") and weight.main_grad.dtype is torch.float32
        total = None
        if is_trained:
            total = weight.main_grad if has_buffer else torch.zeros_like(weight, dtype=torch.float32)
        for chunk in _chunks(hidden, ctx.size):
            inputs = hidden[chunk].detach().requires_grad_(), weight.detach().requires_grad_(is_trained)
            with torch.enable_grad():
                results = ctx.compute(*inputs, chunk)
            pairs = [(one, part[..., chunk]) for one, part in zip(results, gradients, strict=True) if part is not None]
            outputs, of_outputs = zip(*pairs, strict=True)
            gradients_of_inputs = torch.autograd.grad(outputs, inputs[: 1 + is_trained], of_outputs)
            hidden_gradient[chunk] = gradients_of_inputs[0]
            if total is not None:
                total += gradients_of_inputs[1]
        return hidden_gradient, None if has_buffer or total is None else total.to(weight.dtype), None, None


def _chunks(rows: Tensor, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size))


def _default_entries(device: torch.device, dtype: torch.dtype) -> int:
    if device.type == "cpu":
        return CHUNK_ENTRIES
    memory = torch.cuda.get_device_properties(device).total_memory
    entries = torch.tensor([int(memory * GPU_FRACTION) // dtype.itemsize], device=device)
    # Cards may differ.
    dist.all_reduce(entries, dist.ReduceOp.MIN, group=parallel_state.get_tensor_model_parallel_group())
    return int(entries)


def _return_input(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
    return hidden, None


class ValueHead(torch.nn.Module):
    """Replaces the output layer of a GPT model and has its call signature.

    Its weights start at 0, so a new critic predicts 0 everywhere. Tensor-parallel ranks all hold the whole head.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # With sequence parallelism each rank sees a part of the sequence. Megatron adds up the gradients of parameters
        # with this attribute.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Returns values [s, b, 1] in float32 from `hidden` [s, b, h]; `weight`, a tied embedding, is ignored."""
        values = torch.nn.functional.linear(hidden, self.weight).float()
        if self._sequence_parallel:
            # All tensor-parallel ranks go on to compute the same loss, so each takes its slice of the gradient: adding
            # it up over ranks would multiply it by their number.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def attach_value_head(chunk: torch.nn.Module) -> None:
    """Replace the output layer of a freshly loaded GPT model, or of its last pipeline stage, by a value head."""
    model = unwrap_model(chunk)
    if model.post_process:
        model.output_layer = ValueHead(model.config, next(model.parameters()).device)
    # The head shares no weight with the embedding. Megatron reads this flag in forward passes, in the reduction of
    # gradients and in checkpoints.
    model.share_embeddings_and_output_weights = False
