"""MTP heads, which predict further tokens (multi-token prediction; DeepSeek-V3, arXiv 2412.19437, section 2.2).

Head k is one more layer. At a token it gets the hidden state there and the embedding of the token k places later, and
predicts the token after that one with the output layer of the model. Engines use such heads as a draft model.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

_PASSED_ON = (
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
)


def heads_of(config: TransformerConfig) -> int:
    """Number of MTP heads of a model."""
    return config.mtp_num_layers or 0


def return_heads(model: Any) -> None:
    """Let a GPT model's last pipeline stage, whose output layer an `OutputLayer` replaces, compute its MTP heads too.

    In passes with gradients the model then returns the hidden states of all heads after its own, one after the other
    along the sequence. A head's gradient changes nothing but the head: hidden states and embeddings reach it detached.
    """

    def embed(**tokens: Any) -> Tensor:
        with torch.no_grad():
            embedded: Tensor = model.embedding(**tokens)
        return embedded

    def finish(*, hidden_states: Tensor, input_ids: Tensor, **given: Any) -> Tensor:
        if torch.is_grad_enabled():
            # Recomputation needs an input with a gradient.
            inputs = hidden_states.detach().requires_grad_()
            passed = {name: given[name] for name in _PASSED_ON}
            computed = model.mtp(hidden_states=inputs, input_ids=input_ids, embedding=embed, **passed)
            hidden_states = torch.cat([hidden_states, computed[len(hidden_states) :]])
        return hidden_states.transpose(0, 1).contiguous()

    # Megatron would compute the logits of the heads and their loss here.
    model._postprocess = finish
