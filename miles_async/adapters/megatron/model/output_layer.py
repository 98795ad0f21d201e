"""What takes the place of a GPT model's output layer: logits of chosen tokens, or the values of a critic.

`OutputLayer` computes logits only of the tokens whose logits a loss reads, a part of them at a time.

Most logits of a training step are never read: those of prompts, of tool output and of padding. And a [tokens,
vocabulary] tensor in float32 is the largest of the step: 150 MB for 768 tokens and a vocabulary of 49,152.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ENTRIES = 2**23
"""Default of the most logits of a chunk: 32 MiB in float32."""


class OutputLayer:
    """Replaces the call of a GPT model's output layer, so that the model returns hidden states.

    `map` computes the logits of chosen tokens afterwards. The parameters stay in the model.
    """

    def __init__(self, model: Any, chunk_entries: int = CHUNK_ENTRIES) -> None:
        """`model` is the last pipeline stage of a GPT model; `chunk_entries` is the most logits of a chunk."""
        self._chunk_entries = chunk_entries
        self._layer = model.output_layer
        self._compute = self._layer.forward
        self._shared_weight = (
            model.shared_embedding_or_output_weight if model.share_embeddings_and_output_weights else None
        )
        self._dtype = model.config.params_dtype
        self._sequence_parallel = self._layer.sequence_parallel
        if self._sequence_parallel:
            # `map` gathers the hidden states, so the layer itself gets whole rows and adds up their gradients.
            self._layer.sequence_parallel = False
            self._layer.allreduce_dgrad = True
        self._layer.forward = _return_input
        self.columns = self._layer.output_size_per_partition
        """This rank's part of the (padded) vocabulary."""

    def map(self, output: Tensor, rows: Tensor, read: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Apply `read(logits, chunk)` to the logits of all `rows`, chunk by chunk, and concatenate the results.

        `output` [t, h] is the model's output, `rows` [k] are indices of whole sequences' tokens, and `logits` are those
        of `rows[chunk]`. `read` returns a tensor whose last dimension is that of the chunk. The backward pass
        computes the logits of a chunk again if there are several chunks, so no logits outlive their chunk.
        """
        if self._sequence_parallel:
            # All tensor-parallel ranks go on to compute the same loss, so each takes its slice of the gradient.
            group = parallel_state.get_tensor_model_parallel_group()
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=group)
        # Megatron returns a model's output in float32, whatever the precision of its weights.
        hidden = output.index_select(0, rows).to(self._dtype)
        size = max(1, self._chunk_entries // self.columns)
        if len(hidden) <= size:
            return read(self._logits(hidden), slice(0, len(hidden)))

        def compute(part: Tensor, chunk: slice) -> Tensor:
            return read(self._logits(part), chunk)

        results = []
        for start in range(0, len(hidden), size):
            chunk = slice(start, min(start + size, len(hidden)))
            part = hidden[chunk]
            if torch.is_grad_enabled():
                results.append(checkpoint(compute, part, chunk, use_reentrant=False, preserve_rng_state=False))
            else:
                results.append(compute(part, chunk))
        return torch.cat(results, -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = None if self._shared_weight is None else self._shared_weight()
        logits, _ = self._compute(hidden[:, None], weight=weight)
        return logits[:, 0]


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
