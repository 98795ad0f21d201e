"""The dimensions of the model to train, read from its `config.json`, without loading weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles_async.config.schema import Model
from miles_async.models.plugin import ModelPlugin, ModelShape, plugin_errors
from miles_async.models.registry import find_plugin, has_plugin


def shape_of(model: Model) -> ModelShape | None:
    """The dimensions of `hf_checkpoint` or of the tiny model; None if the checkpoint has no readable `config.json`.

    A broken checkpoint is reported elsewhere, by the checks and when the model is loaded. A model type without a
    plug-in, which engines may serve although the learner cannot train it, is read like Llama's. Raises UserError if the
    plug-in fails.
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
    if has_plugin(config.get("model_type", "")):
        plugin = find_plugin(config["model_type"])
    elif "num_hidden_layers" in config:
        plugin = ModelPlugin()
    else:
        return None
    with plugin_errors(plugin, f"read the shape of the model from {model.hf_checkpoint}/config.json"):
        return plugin.shape(config)


def model_type_of(hf_checkpoint: str) -> str | None:
    """The `model_type` of a checkpoint, which selects its plug-in; None if its `config.json` does not define it."""
    return _read_config(hf_checkpoint).get("model_type")


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
