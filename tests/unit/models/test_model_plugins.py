"""Which plug-in describes a model, and what the configuration reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import problems
from miles_async.config.memory import planned_model
from miles_async.config.model_shape import shape_of
from miles_async.config.schema import Model
from miles_async.errors import UserError
from miles_async.models.plugin import MODELS
from tests.configuration import run_config
from tests.plugin_packages import install_plugin

LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
DOUBLED = """
from dataclasses import replace
from miles_async.models.plugin import ModelPlugin

class Doubled(ModelPlugin):
    def layer(self, config, number):
        layer = super().layer(config, number)
        return layer._replace(feed_forward=replace(layer.feed_forward, width=2 * layer.feed_forward.width))
"""


def checkpoint(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_without_a_plugin_is_refused_unless_nothing_is_trained(tmp_path: Path) -> None:
    settings = {"hf_checkpoint": checkpoint(tmp_path, model_type="wheel", vocab_size=7, **LLAMA)}
    data = {"reasoning_gym_task": "chain_sum", "rm_type": "reasoning_gym"}
    run = {**data, "n_samples_per_prompt": 8, "rollout_max_response_len": 8}
    [sentence] = problems(run_config(**run | settings), "train_async.py")
    assert sentence.startswith(f"hf_checkpoint {tmp_path} has the model_type wheel: no model plug-in is called 'wheel'")
    assert "gemma, llama, mixtral, qwen2, qwen3, qwen3_moe" in sentence
    assert problems(run_config(**run | settings, debug_rollout_only=True), "train_async.py") == []
    shape = shape_of(Model(**settings))
    assert shape is not None
    assert shape.vocabulary == 7


def test_the_plugin_describes_the_layers_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, MODELS, "doubled", "doubled:Doubled", DOUBLED)
    path = checkpoint(tmp_path, model_type="doubled", vocab_size=7, **LLAMA)
    shape = shape_of(Model(hf_checkpoint=path))
    assert shape is not None
    assert [shape.kinds[layer].feed_forward.width for layer in shape.layers] == [96, 96]
    assert planned_model(run_config(hf_checkpoint=path)) == shape, "its memory can be planned"


def test_an_error_of_the_plugin_names_it_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = DOUBLED.replace("super().layer(config, number)", "sys.exit(0)")
    install_plugin(tmp_path, monkeypatch, MODELS, "broken", "broken:Doubled", f"import sys\n{broken}")
    with pytest.raises(
        UserError,
        match="the model plug-in broken:Doubled failed to read the shape of the model from "
        f"{tmp_path}/config.json: SystemExit: 0",
    ):
        shape_of(Model(hf_checkpoint=checkpoint(tmp_path, model_type="broken", **LLAMA)))


def test_a_key_that_the_model_needs_and_its_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    model = Model(hf_checkpoint=checkpoint(tmp_path, model_type="gemma", num_hidden_layers=2))
    with pytest.raises(UserError, match=f"{tmp_path}: config.json has no 'hidden_size', which the model needs"):
        shape_of(model)
