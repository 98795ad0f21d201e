"""The layers of models, read from `config.json`: what plug-ins compose, and the families without a plug-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from miles_async.models.layers import Attention, DeltaRule, Experts, FeedForward, LatentAttention, Layer

HfConfig = Mapping[str, Any]
"""The contents of a checkpoint's `config.json`. While a model is built, the defaults of transformers are filled in."""


def plain_layer(config: HfConfig, number: int, *, is_fused_locally: bool = False) -> Layer:
    """A layer like Llama's, with latent attention or experts if `config.json` has their dimensions.

    The first layers may have no experts (DeepSeek).
    """
    mixer = latent_attention(config) if config.get("kv_lora_rank") else attention(config)
    if experts_of(config) is None or number < (config.get("first_k_dense_replace") or 0):
        return Layer(mixer, dense(config))
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    return Layer(mixer, experts(config, shared=shared, is_fused_locally=is_fused_locally))


def experts_of(config: HfConfig) -> int | None:
    """The number of experts of a layer, for which model types have different keys; None for a model without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name)), None)


def attention(config: HfConfig, **features: bool) -> Attention:
    """Attention as most model types have it, with further fields of `Attention`."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return Attention(
        hidden=hidden,
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        width=config.get("head_dim") or hidden // heads,
        **{"has_biases": bool(config.get("attention_bias"))} | features,
    )


def latent_attention(config: HfConfig) -> LatentAttention:
    """Attention with latent keys and values."""
    return LatentAttention(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        query_rank=config.get("q_lora_rank"),
        latent=config["kv_lora_rank"],
        rotated=config["qk_rope_head_dim"],
        plain=config["qk_nope_head_dim"],
        value=config["v_head_dim"],
    )


def dense(config: HfConfig, *, is_fused: bool = True) -> FeedForward:
    """A feed-forward layer."""
    is_silu = config.get("hidden_act", "silu") == "silu"
    return FeedForward(
        hidden=config["hidden_size"],
        width=config["intermediate_size"],
        is_silu=is_silu,
        is_fused=is_fused and is_silu,
    )


def experts(config: HfConfig, **features: Any) -> Experts:
    """The experts of a layer, with further fields of `Experts`."""
    return Experts(
        hidden=config["hidden_size"],
        count=experts_of(config) or config["num_experts"],
        active=config["num_experts_per_tok"],
        width=config.get("moe_intermediate_size") or config["intermediate_size"],
        **features,
    )


def _gpt_oss(config: HfConfig, number: int) -> Layer:
    biases = attention(config, has_biases=True, has_output_bias=True, has_sinks=True)
    return Layer(biases, experts(config, has_biases=True, is_clamped=True))


def _qwen3_5(config: HfConfig, number: int) -> Layer:
    """Each fourth layer has full attention, unless `layer_types` says otherwise. No activation is fused."""
    interval = config.get("full_attention_interval", 4)
    default = "full_attention" if (number + 1) % interval == 0 else "linear_attention"
    kind = (config.get("layer_types") or {number: default})[number]
    mixer: Attention | DeltaRule = attention(config, has_norms=True, has_gate=True)
    if kind == "linear_attention":
        mixer = DeltaRule(
            hidden=config["hidden_size"],
            heads=config["linear_num_value_heads"],
            groups=config["linear_num_key_heads"],
            width=config["linear_key_head_dim"],
            value=config["linear_value_head_dim"],
            convolution=config["linear_conv_kernel_dim"],
        )
    if not config.get("num_experts"):
        return Layer(mixer, dense(config, is_fused=False))
    shared: dict[str, Any] = {"shared": config["shared_expert_intermediate_size"], "has_shared_gate": True}
    return Layer(mixer, experts(config, **shared, is_fused=False, is_fused_locally=False))


FAMILIES: Mapping[str, Callable[[HfConfig, int], Layer]] = {
    "mistral": plain_layer,
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), partial(plain_layer, is_fused_locally=True)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _qwen3_5),
}
"""The layers of models without a plug-in whose memory can be planned, by `model_type`."""
ADAPTED = (
    *("gemma", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
"""Model types whose adapters SGLang 0.5.20 computes. Of Qwen3-Next and DeepSeek-V3, it assumes other dimensions."""
