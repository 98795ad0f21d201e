"""The tensors of MTP heads in a checkpoint. The learner and the processes of engines read this module."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from miles_async.models.text_part import text_config

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def layers_of_heads(config: Mapping[str, Any]) -> range:
    """The numbers of the layers that are MTP heads by a checkpoint's `config.json`; empty if it counts none."""
    config = text_config(config)
    # Nemotron-H has a list of layers.
    layers = config.get("num_hidden_layers") or len(config.get("layers_block_type") or ())
    return range(layers, layers + (config.get("num_nextn_predict_layers") or 0)) if layers else range(0)


def is_of_heads(name: str, further: Container[int]) -> bool:
    """Whether a tensor of a checkpoint belongs to MTP heads only.

    Some families name them `mtp`. Others number them as `further` layers, after those of the model.
    """
    number = _LAYER.search(name)
    return name.startswith("mtp.") or (number is not None and int(number[1]) in further)
