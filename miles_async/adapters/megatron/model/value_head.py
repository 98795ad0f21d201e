"""Turns a language model into a critic: one value per token in place of one logit per vocabulary entry."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor


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
