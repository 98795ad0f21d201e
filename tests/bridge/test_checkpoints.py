"""Checkpoints that do not fit are refused with one sentence, and a learner resumes from its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from miles_async.adapters.megatron.model import bridge_source
from miles_async.adapters.megatron.model.process_groups import destroy_process_groups
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.batch import rank_batches
from miles_async.config.model_source import TESTED, UNTESTED
from miles_async.errors import UserError
from miles_async.models.text_part import TEXT_PARTS, is_of_images
from tests.bridge.computing import SEQUENCES, bridge_config, train_step
from tests.bridge.families import FAMILIES, tensors_of, write_checkpoint
from tests.stack.learning import learning, save_state, uneven_groups, weights_of


def refusal(path: Path, **settings: Any) -> str:
    try:
        with pytest.raises(UserError) as refused:
            MegatronLearner(bridge_config(**settings), str(path), 0, 1, "127.0.0.1", free_port())
    finally:
        destroy_process_groups()
    return str(refused.value)


def change(path: Path, tensors: Mapping[str, torch.Tensor | None] = MappingProxyType({}), **config: Any) -> Path:
    """Replace tensors, or remove those that are None, and keys of `config.json`."""
    changed = {**tensors_of(path), **tensors}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def test_a_tensor_that_the_checkpoint_lacks_is_named_with_its_parameter(tmp_path: Path) -> None:
    path = change(write_checkpoint("DeepSeek-V3", tmp_path), {"model.layers.1.mlp.experts.2.up_proj.weight": None})
    assert refusal(path).startswith(
        f"{path} has no tensor model.layers.1.mlp.experts.2.up_proj.weight, which Megatron's "
        "decoder.layers.1.mlp.experts.linear_fc1.weight2 holds: use a complete checkpoint"
    )


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    path = change(write_checkpoint("Qwen3", tmp_path), {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)})
    assert "has a tensor model.layers.1.self_attn.q_proj.bias, which the model of its config.json does" in refusal(path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = change(write_checkpoint("Llama", tmp_path), {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 96)})
    assert (
        f"model.layers.0.mlp.down_proj.weight (64, 96) of {path} does not fit Megatron's "
        "decoder.layers.0.mlp.linear_fc2.weight, whose shape is (64, 128): use a checkpoint whose config.json"
    ) in refusal(path)


def test_a_config_with_other_heads_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = change(write_checkpoint("Llama", tmp_path), num_key_value_heads=4)
    assert "does not fit Megatron's decoder.layers.0.self_attention.linear_qkv.weight" in refusal(path)


def test_layers_that_the_config_does_not_count_are_refused(tmp_path: Path) -> None:
    path = change(write_checkpoint("Llama", tmp_path), num_hidden_layers=1)
    assert f"{path} has a tensor model.layers.1.input_layernorm.weight, which the model of its config" in refusal(path)


def test_a_tensor_that_the_text_part_does_not_have_is_named_as_in_the_checkpoint(tmp_path: Path) -> None:
    name = "language_model.model.layers.1.self_attn.q_proj.bias"
    path = write_checkpoint("Gemma 3, images", tmp_path)
    tensors = {held: one for held, one in load_file(path / "model.safetensors").items() if is_of_images(held)}
    assert f"has a tensor {name}, which the model of its config.json does" in refusal(
        change(path, {**tensors, name: torch.zeros(64)})
    )


def test_heads_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = write_checkpoint("DeepSeek-V3", tmp_path)
    expected = tensors_of(path)
    extra = {f"model.layers.2.{name}": torch.zeros(64) for name in ("enorm.weight", "hnorm.weight")}
    with learning(change(path, extra, num_nextn_predict_layers=1), bridge_config()) as learner:
        assert weights_of(learner).keys() == expected.keys()


def test_an_architecture_is_listed_if_the_bridge_has_it() -> None:
    supported = bridge_source._library(local=True).AutoBridge.list_supported_models()
    assert {name for name in supported if name.endswith("ForCausalLM")} == TESTED | UNTESTED


def test_every_architecture_that_needs_no_request_is_compared_with_transformers() -> None:
    def architecture(name: str) -> str:
        family = FAMILIES[name]
        config = getattr(transformers, family.config)
        model: Any = transformers.AutoModelForCausalLM._model_mapping[config]
        return family.architecture or str(model.__name__)

    assert {architecture(name) for name in FAMILIES} == TESTED | TEXT_PARTS.keys()
    assert set(TEXT_PARTS.values()) <= TESTED


RESUMED = {
    "Qwen3": "bf16",
    "Gemma 3": "fp32",
    "Qwen3.5-MoE": "fp32",
    "Qwen3.5-MoE, images": "bf16",
    "DeepSeek-V3": "bf16",
    "gpt-oss": "fp32",
    "Nemotron-H": "fp32",
}
"""Families, by the layers that are stored in different ways, and the precision of the learner."""


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_learner_continues_as_if_never_interrupted(tmp_path: Path, name: str) -> None:
    path, run = write_checkpoint(name, tmp_path / "model"), bridge_config(lr=0.01, precision=RESUMED[name])

    with learning(path, run) as learner:
        first = train_step(learner, run, 0)
        save_state(learner, tmp_path / "state")
        second = train_step(learner, run, 1)
    with learning(path, run) as learner:
        learner.load_state(str(tmp_path / "state"))
        assert_equal(weights_of(learner), first)
        assert_equal(train_step(learner, run, 1), second)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_critic_and_a_reference_model_come_from_the_bridge_too(tmp_path: Path) -> None:
    path = write_checkpoint("Qwen3.5", tmp_path / "model")
    run = bridge_config(advantage_estimator="ppo", use_kl_loss=True, kl_loss_coef=0.1, critic_lr=0.01, lr=0.01)
    with learning(path, run) as learner:
        before = learner.logprobs(SEQUENCES[:1])
        report = learner.train(0, rank_batches(uneven_groups(0), run, 1)[0])
        assert report.finite
        assert report.metrics["value_loss"] > 0
        assert learner.logprobs(SEQUENCES[:1]) != before


def test_a_model_with_a_plugin_computes_the_same_from_both_sources(tmp_path: Path) -> None:
    path = write_checkpoint("Qwen3-MoE", tmp_path / "model")
    found: dict[str, dict[str, torch.Tensor]] = {}
    for mode in ("raw", "bridge"):
        run = bridge_config(lr=0.01, clip_grad=1.0, megatron_to_hf_mode=mode)
        with learning(path, run) as learner:
            assert learner.train(0, rank_batches(uneven_groups(0), run, 1)[0]).finite
            found[mode] = weights_of(learner)
    for name, tensor in found["raw"].items():
        assert torch.allclose(found["bridge"][name], tensor, atol=1e-4), name
