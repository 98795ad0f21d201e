"""Which tensors of a checkpoint belong to MTP heads follows from their names and from `config.json`."""

from __future__ import annotations

from typing import Any

import pytest

from miles_async.models.mtp_heads import is_of_heads, layers_of_heads


@pytest.mark.parametrize(
    "config, heads",
    [
        ({"num_hidden_layers": 3, "num_nextn_predict_layers": 2}, [3, 4]),
        ({"text_config": {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}}, [3]),
        ({"layers_block_type": ["mamba", "attention"], "num_nextn_predict_layers": 1}, [2]),
        ({"num_hidden_layers": 3, "num_nextn_predict_layers": None}, []),
        ({"num_hidden_layers": 3}, []),
        ({"num_nextn_predict_layers": 1}, []),
    ],
)
def test_heads_are_the_layers_after_those_of_the_model(config: dict[str, Any], heads: list[int]) -> None:
    assert list(layers_of_heads(config)) == heads


@pytest.mark.parametrize(
    "name, is_theirs",
    [
        ("model.layers.3.self_attn.q_proj.weight", True),
        ("model.layers.2.self_attn.q_proj.weight", False),
        ("mtp.layers.0.self_attn.q_proj.weight", True),
        ("model.embed_tokens.weight", False),
    ],
)
def test_a_tensor_belongs_to_heads_by_its_layer_or_by_its_prefix(name: str, is_theirs: bool) -> None:
    assert is_of_heads(name, range(3, 4)) is is_theirs
