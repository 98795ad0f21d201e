"""Flags of Megatron-LM that describe a model, compared with the `config.json` of its checkpoint.

Scripts for slime and Miles repeat the shape of the model in these flags. A run reads it from the checkpoint, so the
flags can only agree with it or be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miles_async.models.families import experts_of
from miles_async.models.text_part import text_config

Config = Mapping[str, Any]
_REPEATED = re.compile(r"\[(\d(?:,\d)*),?\](?:\*(\d+))?")
_Reader = Callable[[Config], Any]
"""Returns the value of a flag, 0 if the model has no such part, and None if `config.json` does not tell."""


def _first(*names: str) -> _Reader:
    """The value of the first key that `config.json` has."""
    return lambda config: next((config[name] for name in names if config.get(name) is not None), None)


def _rope(name: str) -> _Reader:
    """A parameter of the rotary embedding, which newer files keep in a dictionary of their own."""

    def read(config: Config) -> Any:
        nested: Config = config.get("rope_parameters") or {}
        nested = nested.get("full_attention", nested)
        return config.get(name, nested.get(name))

    return read


def _head_width(config: Config) -> Any:
    if config.get("kv_lora_rank"):
        return None
    if "hidden_size" not in config or "num_attention_heads" not in config:
        return config.get("head_dim")
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _layers_with_experts(config: Config) -> Any:
    """Megatron's `--moe-layer-freq`: 1 for each layer with experts, 0 for each other one."""
    if not experts_of(config):
        return None
    dense, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    layers = config["num_hidden_layers"]
    only_dense = config.get("mlp_only_layers") or []
    return [int(n >= dense and (n + 1) % step == 0 and n not in only_dense) for n in range(layers)]


def _shared_experts(config: Config) -> Any:
    if (width := config.get("shared_expert_intermediate_size")) is not None:
        return width
    number, width = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    return None if number is None or width is None else number * width


def _of_latent_attention(name: str) -> _Reader:
    return lambda config: config.get(name) if config.get("kv_lora_rank") else 0


def _activation(config: Config) -> Any:
    return config.get("hidden_act", config.get("hidden_activation"))


_SILU = {"silu": True, "swish": True, "gelu": False, "gelu_pytorch_tanh": False, "relu2": False}


def _squared_relu(config: Config) -> bool | None:
    """Whether the activation is a squared ReLU. Nemotron-H names it with another key than other models."""
    if "mlp_hidden_act" in config:
        return bool(config["mlp_hidden_act"] == "relu2")
    activation = _activation(config)
    return None if activation is None or config.get("model_type") == "nemotron_h" else activation == "relu2"


def _without_biases(config: Config) -> bool | None:
    """Whether the linear layers beside those of queries, keys and values have no biases; None if `config.json` does
    not tell."""
    if (biases := config.get("mlp_bias")) is not None:
        return not biases
    return True if str(config.get("model_type")).startswith(_WITHOUT_BIASES) else None


def _router_score(config: Config) -> Any:
    """The function of the router's scores, which configurations of these types do not name."""
    if (named := config.get("scoring_func")) is not None or not experts_of(config):
        return named
    return "softmax" if str(config.get("model_type")).startswith(("qwen", "mixtral")) else None


def _qk_norm(config: Config) -> bool | None:
    """Whether queries and keys are normalized; None if `config.json` does not tell."""
    if "use_qk_norm" in config:
        return bool(config["use_qk_norm"])
    kind = str(config.get("model_type"))
    if kind.startswith(("qwen3", "gemma3")):
        return True
    return False if kind in ("llama", "qwen2", "mistral", "mixtral") else None


_WITHOUT_BIASES = ("qwen2", "qwen3", "mistral", "mixtral")

COMPARED: Mapping[str, _Reader] = {
    "num_layers": _first("num_hidden_layers"),
    "hidden_size": _first("hidden_size"),
    "ffn_hidden_size": _first("intermediate_size"),
    "num_attention_heads": _first("num_attention_heads"),
    "group_query_attention": lambda config: None if config.get("kv_lora_rank") else "num_key_value_heads" in config,
    "num_query_groups": lambda config: None if config.get("kv_lora_rank") else config.get("num_key_value_heads"),
    "kv_channels": _head_width,
    "vocab_size": _first("vocab_size"),
    "max_position_embeddings": _first("max_position_embeddings"),
    "norm_epsilon": _first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "normalization": lambda config: "RMSNorm" if "rms_norm_eps" in config else None,
    "rotary_base": _rope("rope_theta"),
    "rotary_percent": lambda config: _rope("partial_rotary_factor")(config) or 1.0,
    "swiglu": lambda config: _SILU.get(_activation(config)),
    "squared_relu": _squared_relu,
    "qk_layernorm": _qk_norm,
    "add_qkv_bias": lambda config: bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
    "untie_embeddings_and_output_weights": lambda config: not config.get("tie_word_embeddings", False),
    "multi_latent_attention": lambda config: bool(config.get("kv_lora_rank")),
    "q_lora_rank": _of_latent_attention("q_lora_rank"),
    "kv_lora_rank": _of_latent_attention("kv_lora_rank"),
    "qk_head_dim": _of_latent_attention("qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _of_latent_attention("qk_rope_head_dim"),
    "v_head_dim": _of_latent_attention("v_head_dim"),
    "rotary_scaling_factor": lambda config: (config.get("rope_scaling") or {}).get("factor"),
    "mscale": lambda config: (config.get("rope_scaling") or {}).get("mscale"),
    "mscale_all_dim": lambda config: (config.get("rope_scaling") or {}).get("mscale_all_dim"),
    "num_experts": lambda config: experts_of(config) or 0,
    "moe_ffn_hidden_size": lambda config: config.get("moe_intermediate_size") if experts_of(config) else None,
    "moe_router_topk": lambda config: config.get("num_experts_per_tok") if experts_of(config) else None,
    "moe_layer_freq": _layers_with_experts,
    "moe_shared_expert_intermediate_size": _shared_experts,
    "moe_router_score_function": _router_score,
    "moe_router_num_groups": _first("n_group"),
    "moe_router_group_topk": _first("topk_group"),
    "moe_router_topk_scaling_factor": _first("routed_scaling_factor"),
    "disable_bias_linear": _without_biases,
    "rope_scaling_factor": lambda config: (config.get("rope_scaling") or {}).get("factor"),
    "linear_attention_freq": lambda config: config.get("full_attention_interval"),
    "linear_conv_kernel_dim": _first("linear_conv_kernel_dim"),
    "linear_key_head_dim": _first("linear_key_head_dim"),
    "linear_value_head_dim": _first("linear_value_head_dim"),
    "linear_num_key_heads": _first("linear_num_key_heads"),
    "linear_num_value_heads": _first("linear_num_value_heads"),
    "mtp_num_layers": _first("num_nextn_predict_layers", "mtp_num_hidden_layers"),
}
"""How to read the value of each flag, given with underscores, from `config.json`."""


def differences(flags: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Each flag whose value differs from that of the checkpoint, with both values."""
    for name, given in flags.items():
        theirs = _read(name, config)
        if theirs is not None and not _equal(given, theirs):
            yield name, given, theirs


def incomparable(flags: Mapping[str, Any], config: Config) -> list[str]:
    """The flags with which nothing in `config.json` can be compared, or whose value cannot be understood."""
    theirs = {name: _read(name, config) for name in flags}
    return [name for name, value in theirs.items() if value is None or not _is_understood(flags[name], value)]


def _is_understood(given: Any, theirs: Any) -> bool:
    return not isinstance(theirs, list) or _frequency(given, len(theirs)) is not None


def _read(name: str, config: Config) -> Any:
    """The value of a flag in `config.json`; None if the file does not tell."""
    text, reader = text_config(config), COMPARED.get(name)
    return None if reader is None or not text else reader(text)


def _frequency(given: Any, layers: int) -> list[int] | None:
    """The layers with experts by Megatron's notation: every n-th layer, or a list such as `[0]*3+[1]*58`."""
    if isinstance(given, int) and given > 0:
        return [int(n % given == 0) for n in range(layers)]
    found: list[int] = []
    for part in re.sub(r"[()\s]", "", str(given)).split("+"):
        if (match := _REPEATED.fullmatch(part)) is None:
            return None
        found += [int(one) for one in match[1].split(",")] * int(match[2] or 1)
    return found


def _equal(given: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        return not _is_understood(given, theirs) or _frequency(given, len(theirs)) == theirs
    if isinstance(theirs, bool) or isinstance(given, bool):
        return bool(given) == bool(theirs)
    if isinstance(theirs, int | float) and isinstance(given, int | float):
        return abs(given - theirs) <= 1e-9 * max(abs(given), abs(theirs))
    return str(given) == str(theirs)
