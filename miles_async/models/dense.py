"""Plug-ins for dense models: Llama (with SmolLM2 and other models of its type), Qwen2 and Qwen2.5, and Qwen3."""

from __future__ import annotations

from typing import Any

from miles_async.models.families import HfConfig, attention, dense
from miles_async.models.layers import Layer
from miles_async.models.plugin import Conversion, ModelPlugin, Same


class Llama(ModelPlugin):
    """Llama 1 to 3.3, and models with the same layers."""

    name = "llama"


class Qwen2(ModelPlugin):
    """Qwen2 and Qwen2.5: the projections of queries, keys and values have biases."""

    name = "qwen2"

    def layer(self, config: HfConfig, number: int) -> Layer:
        return Layer(attention(config, has_biases=True), dense(config))

    def transformer_config(self, config: HfConfig) -> dict[str, Any]:
        return {"add_qkv_bias": True}


class Qwen3(ModelPlugin):
    """Qwen3: each head of queries and keys is normalized (arXiv 2505.09388, section 2)."""

    name = "qwen3"

    def layer(self, config: HfConfig, number: int) -> Layer:
        return Layer(attention(config, has_norms=True), dense(config))

    def transformer_config(self, config: HfConfig) -> dict[str, Any]:
        return super().transformer_config(config) | {"qk_layernorm": True}

    def layer_tensors(self, config: HfConfig) -> dict[str, Conversion]:
        return super().layer_tensors(config) | {
            "self_attention.q_layernorm.weight": Same("self_attn.q_norm.weight"),
            "self_attention.k_layernorm.weight": Same("self_attn.k_norm.weight"),
        }
