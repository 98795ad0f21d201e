"""The dimensions of the model to train, read from its `config.json`, without loading weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_async.config.schema import Model


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    """Number of query heads."""
    query_groups: int
    """Number of key/value heads; several query heads share one (grouped-query attention)."""
    head_width: int
    feed_forward: int
    """Width of the feed-forward layers, or of one expert in a mixture-of-experts model."""
    experts: int | None
    """Number of experts per mixture-of-experts layer; None for a dense model."""
    active_experts: int
    """Number of experts that each token is routed to; 1 for a dense model."""
    vocabulary: int
    """Vocabulary size before padding for tensor parallelism; 0 if `config.json` does not define it."""


def shape_of(model: Model) -> ModelShape | None:
    """The dimensions of `hf_checkpoint` or of the tiny model; None if the checkpoint has no readable `config.json`.

    A broken checkpoint is reported elsewhere, by the checks and when the model is loaded.
    """
    if model.hf_checkpoint is None:
        tiny = model.tiny_model
        return ModelShape(
            layers=tiny.num_layers,
            hidden=tiny.hidden_size,
            heads=tiny.num_attention_heads,
            query_groups=tiny.num_query_groups,
            head_width=tiny.hidden_size // tiny.num_attention_heads,
            feed_forward=tiny.ffn_hidden_size,
            experts=None,
            active_experts=1,
            vocabulary=0,
        )
    config = _read_config(model.hf_checkpoint)
    if "num_hidden_layers" not in config:
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        query_groups=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or hidden // heads,
        feed_forward=(config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"],
        experts=experts,
        active_experts=config["num_experts_per_tok"] if experts else 1,
        vocabulary=config.get("vocab_size", 0),
    )


def balances_experts_by_bias(model: Model) -> bool:
    """Whether each optimizer step adjusts the biases of the routers to the number of tokens that each expert received.

    The routers of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and of the models that adopted them learn in this way.
    The `config.json` of these models calls the number of experts `n_routed_experts`.
    """
    config = {} if model.hf_checkpoint is None else _read_config(model.hf_checkpoint)
    return "n_routed_experts" in config or "n_routed_experts" in (config.get("text_config") or {})


def _read_config(hf_checkpoint: str) -> dict[str, Any]:
    """The contents of `config.json`; an empty dictionary if there is no readable one."""
    try:
        config: dict[str, Any] = json.loads((Path(hf_checkpoint).expanduser() / "config.json").read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return config
