"""The sizes of the model to train, read from its configuration and not from its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from miles_async.config.schema import Model


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    heads: int
    query_groups: int
    """Heads of keys and values, which several heads of queries share."""
    head_width: int
    feed_forward: int
    """Width of a layer's feed-forward part, or of one expert."""
    experts: int | None
    """Of each mixture-of-experts layer; None in a dense model."""
    active_experts: int
    """How many of them a token passes through; 1 in a dense model."""
    vocabulary: int
    """Without what ranks pad it to; 0 where the configuration does not say."""


def shape_of(model: Model) -> ModelShape | None:
    """None where `hf_checkpoint` is no folder of a checkpoint; what is wrong with it is for others to say."""
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
    try:
        found = json.loads((Path(model.hf_checkpoint).expanduser() / "config.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    if "num_hidden_layers" not in found:
        return None
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    experts = found.get("num_experts") or found.get("num_local_experts")
    return ModelShape(
        layers=found["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        query_groups=found.get("num_key_value_heads") or heads,
        head_width=found.get("head_dim") or hidden // heads,
        feed_forward=(found.get("moe_intermediate_size") if experts else None) or found["intermediate_size"],
        experts=experts,
        active_experts=found["num_experts_per_tok"] if experts else 1,
        vocabulary=found.get("vocab_size", 0),
    )
