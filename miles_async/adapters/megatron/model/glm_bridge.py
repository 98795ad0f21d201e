"""Conversions of GLM-4, which Megatron-Bridge lacks, registered with it: GLM-4 (`glm`) and GLM-4-0414 (`glm4`)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.bridge.models.common.te_layers import TERowParallelLinearLayerNorm
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
)
from megatron.bridge.models.gpt_provider import transformer_engine_layer_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

_LAYER, _HF_LAYER = "decoder.layers.*.", "model.layers.*."
_SAME = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    f"{_LAYER}self_attention.linear_qkv.layer_norm_weight": f"{_HF_LAYER}input_layernorm.weight",
    f"{_LAYER}self_attention.linear_proj.weight": f"{_HF_LAYER}self_attn.o_proj.weight",
    f"{_LAYER}self_attention.linear_proj.post_layernorm.weight": f"{_HF_LAYER}post_self_attn_layernorm.weight",
    f"{_LAYER}mlp.linear_fc1.layer_norm_weight": f"{_HF_LAYER}post_attention_layernorm.weight",
    f"{_LAYER}mlp.linear_fc2.weight": f"{_HF_LAYER}mlp.down_proj.weight",
    f"{_LAYER}mlp.linear_fc2.post_layernorm.weight": f"{_HF_LAYER}post_mlp_layernorm.weight",
}
"""Tensors that are the same in both; the norms after a layer are GLM-4-0414's."""


class _GateUp(MegatronParamMapping):  # type: ignore[misc]
    """The gate and up projections, which the checkpoint has in one tensor."""

    def __init__(self, megatron_param: str, hf_param: str) -> None:
        super().__init__(megatron_param, hf_param)
        self._gated = GatedMLPMapping(megatron_param, gate=f"{hf_param}.gate", up=f"{hf_param}.up")

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: Any) -> Any:
        gate, up = hf_weights.chunk(2)
        return self._gated.hf_to_megatron({"gate": gate, "up": up}, megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: Any) -> dict[str, Tensor]:
        parts = self._gated.megatron_to_hf(megatron_weights, megatron_module)
        return {self.hf_param: torch.cat(list(parts.values()))} if parts else {}


def _norms_after_layers(config: Any) -> Any:
    """The layer spec of GLM-4-0414, which normalizes the outputs of attention and feed-forward parts."""
    spec = transformer_engine_layer_spec(config)
    spec.submodules.self_attention.submodules.linear_proj = TERowParallelLinearLayerNorm
    spec.submodules.mlp.keywords["submodules"].linear_fc2 = TERowParallelLinearLayerNorm
    return spec


@MegatronModelBridge.register_bridge(source="GlmForCausalLM", target=GPTModel, model_type="glm")
class GlmBridge(MegatronModelBridge):  # type: ignore[misc]
    """GLM-4: Llama's layers, but with biases of queries, keys and values, and another order in the rotary embedding."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        provider = super().provider_bridge(hf_pretrained)
        provider.normalization, provider.gated_linear_unit, provider.add_bias_linear = "RMSNorm", True, False
        provider.hidden_dropout, provider.rotary_interleaved = 0.0, True
        provider.rotary_percent = hf_pretrained.config.rope_parameters["partial_rotary_factor"]
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        attention = [
            QKVMapping(
                f"{_LAYER}self_attention.linear_qkv.{kind}",
                **{name: f"{_HF_LAYER}self_attn.{name}_proj.{kind}" for name in "qkv"},
            )
            for kind in ("weight", "bias")
        ]
        gate_up = _GateUp(f"{_LAYER}mlp.linear_fc1.weight", f"{_HF_LAYER}mlp.gate_up_proj.weight")
        return MegatronMappingRegistry(*(AutoMapping(*names) for names in _SAME.items()), *attention, gate_up)


@MegatronModelBridge.register_bridge(source="Glm4ForCausalLM", target=GPTModel, model_type="glm4")
class Glm4Bridge(GlmBridge):
    """GLM-4-0414: the same with norms also after attention and feed-forward parts."""

    def provider_bridge(self, hf_pretrained: Any) -> Any:
        provider = super().provider_bridge(hf_pretrained)
        provider.transformer_layer_spec = _norms_after_layers
        return provider
