"""The layers of the model families for which a memory plan is known, read from `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles_async.models.plugin import ModelShape, experts_of
from miles_async.models.text_part import text_config
from miles_async.planning.layers import (
    Architecture,
    Attention,
    DeltaRule,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
)

HfConfig = Mapping[str, Any]


def architecture(config: HfConfig) -> Architecture | None:
    """The layers of a model from the contents of its `config.json`; None if its `model_type` is not known here.

    Raises KeyError if a dimension is missing.
    """
    config = text_config(config)
    layer = _FAMILIES.get(config.get("model_type", ""))
    if layer is None:
        return None
    layers = [layer(config, number) for number in range(config["num_hidden_layers"])]
    kinds = tuple(dict.fromkeys(layers))
    return Architecture(
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        is_tied=config.get("tie_word_embeddings", config["model_type"] in _TIED),
        kinds=kinds,
        layers=tuple(map(kinds.index, layers)),
    )


def plain_architecture(shape: ModelShape) -> Architecture:
    """A model whose decoder layers are all like Llama's, or have experts in place of the feed-forward layer."""
    hidden = shape.hidden
    attention = Attention(hidden=hidden, heads=shape.heads, groups=shape.query_groups, width=shape.head_width)
    feed_forward: FeedForward | Experts = FeedForward(hidden=hidden, width=shape.feed_forward)
    if shape.experts is not None:
        feed_forward = Experts(
            hidden=hidden, count=shape.experts, active=shape.active_experts, width=shape.feed_forward
        )
    return Architecture(
        hidden=hidden,
        vocabulary=shape.vocabulary,
        is_tied=False,
        kinds=(Layer(attention, feed_forward),),
        layers=(0,) * shape.layers,
    )


def _attention(config: HfConfig, **features: bool) -> Attention:
    heads = config["num_attention_heads"]
    return Attention(
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        width=config.get("head_dim") or config["hidden_size"] // heads,
        **{"has_biases": bool(config.get("attention_bias"))} | features,
    )


def _dense(config: HfConfig, *, is_fused: bool = True) -> FeedForward:
    is_silu = config.get("hidden_act", "silu") == "silu"
    return FeedForward(
        hidden=config["hidden_size"],
        width=config["intermediate_size"],
        is_silu=is_silu,
        is_fused=is_fused and is_silu,
    )


def _experts(config: HfConfig, **features: Any) -> Experts:
    if (count := experts_of(config)) is None:
        raise KeyError("num_experts")
    return Experts(
        hidden=config["hidden_size"],
        count=count,
        active=config["num_experts_per_tok"],
        width=config.get("moe_intermediate_size") or config["intermediate_size"],
        **features,
    )


def _llama(config: HfConfig, number: int) -> Layer:
    return Layer(_attention(config), _dense(config))


def _gpt_oss(config: HfConfig, number: int) -> Layer:
    attention = _attention(config, has_biases=True, has_output_bias=True, has_sinks=True)
    return Layer(attention, _experts(config, has_biases=True, is_clamped=True))


def _deepseek(config: HfConfig, number: int) -> Layer:
    attention = LatentAttention(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        query_rank=config.get("q_lora_rank"),
        latent=config["kv_lora_rank"],
        rotated=config["qk_rope_head_dim"],
        plain=config["qk_nope_head_dim"],
        value=config["v_head_dim"],
    )
    if number < config.get("first_k_dense_replace", 0):
        return Layer(attention, _dense(config))
    shared = config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0)
    return Layer(attention, _experts(config, shared=shared))


def _qwen3_5(config: HfConfig, number: int) -> Layer:
    """Each fourth layer has full attention, unless `layer_types` says otherwise. No activation is fused."""
    interval = config.get("full_attention_interval", 4)
    default = "full_attention" if (number + 1) % interval == 0 else "linear_attention"
    kind = (config.get("layer_types") or {number: default})[number]
    attention: Attention | DeltaRule = _attention(config, has_norms=True, has_gate=True)
    if kind == "linear_attention":
        attention = DeltaRule(
            hidden=config["hidden_size"],
            key_heads=config["linear_num_key_heads"],
            value_heads=config["linear_num_value_heads"],
            key_width=config["linear_key_head_dim"],
            value_width=config["linear_value_head_dim"],
            convolution=config["linear_conv_kernel_dim"],
        )
    if not config.get("num_experts"):
        return Layer(attention, _dense(config, is_fused=False))
    shared: dict[str, Any] = {"shared": config["shared_expert_intermediate_size"], "has_shared_gate": True}
    return Layer(attention, _experts(config, **shared, is_fused=False, is_fused_locally=False))


_FAMILIES: Mapping[str, Callable[[HfConfig, int], Layer]] = {
    "llama": _llama,
    "mistral": _llama,
    "gemma": _llama,
    "qwen2": lambda config, _: Layer(_attention(config, has_biases=True), _dense(config)),
    "qwen3": lambda config, _: Layer(_attention(config, has_norms=True), _dense(config)),
    "mixtral": lambda config, _: Layer(_attention(config), _experts(config, is_fused_locally=False)),
    "qwen3_moe": lambda config, _: Layer(_attention(config, has_norms=True), _experts(config)),
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "qwen3_next": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
}
"""By `model_type`: the function that returns a layer from `config.json` and the number of the layer."""
ADAPTED = (
    *("gemma", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
"""Model types whose adapters SGLang 0.5.20 computes. Of Qwen3-Next and DeepSeek-V3, it assumes other dimensions."""
_TIED = ("gemma",)
"""Model types for which transformers ties the embeddings unless `config.json` says otherwise."""
