"""What makes a language model a critic: one number per token instead of a vocabulary's worth."""

from __future__ import annotations

from typing import Any

import torch
from mbridge.core.util import unwrap_model
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class ValueHead(torch.nn.Module):
    """In the place of a GPT model's output layer, called like it. Its first values are all 0.

    Ranks that share layers hold it whole, each the same.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # Each rank sees a part of the sequence: Megatron adds up the gradients of parameters that say so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """[s, b, 1] from [s, b, h]; `weight`, a tied embedding, is of no use here."""
        values = torch.nn.functional.linear(hidden, self.weight).float()
        if self._sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def attach_value_head(chunk: torch.nn.Module) -> None:
    """Give a freshly loaded GPT model, or the last stage of one, a head for values; its body keeps its weights."""
    model = unwrap_model(chunk)
    if model.post_process:
        model.output_layer = ValueHead(model.config, next(model.parameters()).device)
    model.share_embeddings_and_output_weights = False
