"""Megatron's layers for machines without CUDA: its local ones, with attention and norms from torch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import moe_utils

from miles_async.adapters.megatron.model.attention import CpuAttention


class CpuNorm(torch.nn.RMSNorm):
    """Megatron's own local norm refuses sequence parallelism, which only asks that its gradients are added up."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def cpu_layers(bridge: Any, vp_stage: int | None = None) -> Any:
    """The layers of one stage of the pipeline."""
    # The router asks whether there is Transformer Engine's matrix product, by a name that only exists where there is.
    vars(moe_utils).setdefault("te_general_gemm", None)
    block = get_gpt_decoder_block_spec(bridge.config, use_transformer_engine=False, vp_stage=vp_stage)
    block.layer_norm = CpuNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = CpuNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CpuAttention
        if bridge.config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = CpuNorm
    return block
