"""Where the learner takes a model from, and what a refusal advises."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from miles_async.config import model_source
from miles_async.config.checks import notes, problems
from miles_async.config.model_shape import shape_of
from miles_async.config.model_source import BRIDGE_VERSION, source_of
from miles_async.config.schema import Model
from miles_async.errors import UserError
from tests.configuration import run_config

ROOT = Path(__file__).parents[3]
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
}
DENSE = {name: value for name, value in DEEPSEEK.items() if "expert" not in name and "moe" not in name}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA3 = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6},
    "vision_config": {"hidden_size": 7},
}
GENERATION = {"n_samples_per_prompt": 8, "rollout_max_response_len": 8}
RUN = {"reasoning_gym_task": "chain_sum", "rm_type": "reasoning_gym", **GENERATION}


def checkpoint(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def with_bridge(monkeypatch: pytest.MonkeyPatch, version: str | None = BRIDGE_VERSION, python: int = 12) -> None:
    """A process of this Python with this version of Megatron-Bridge; None is no bridge."""

    def installed(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(model_source, "version", installed)
    monkeypatch.setattr(sys, "version_info", type("Version", (tuple,), {"major": 3, "minor": python})((3, python)))


def test_a_model_with_a_plugin_comes_from_it_unless_the_bridge_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bridge(monkeypatch)
    path = checkpoint(tmp_path, QWEN3)
    assert [source_of(mode, path) for mode in (None, "raw", "bridge")] == ["raw", "raw", "bridge"]


def test_a_run_that_trains_an_adapter_takes_the_plugin_although_the_bridge_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bridge(monkeypatch, None)
    path = checkpoint(tmp_path, DENSE | QWEN3 | {"num_key_value_heads": 2})
    assert source_of("bridge", path, trains_adapter=True) == "raw"
    run = run_config(**RUN, hf_checkpoint=path, megatron_to_hf_mode="bridge", lora_rank=8)
    assert [note for note in notes(run, "train_async.py") if "bridge" in note] == [
        "megatron_to_hf_mode bridge has no effect with lora_rank, because the model has a plug-in, which the learner "
        "uses"
    ]
    assert problems(run, "train_async.py") == []


def test_a_family_whose_adapters_engines_do_not_compute_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bridge(monkeypatch)
    path = checkpoint(tmp_path, DENSE | {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]})
    assert source_of("bridge", path, trains_adapter=True) == "bridge"
    run = run_config(**RUN, hf_checkpoint=path, lora_rank=8)
    assert problems(run, "train_async.py") == [
        "lora_rank: models of the type glm4 get no adapters; train one of gemma, gpt_oss, llama, mistral, mixtral, "
        "qwen2, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, or unset lora_rank"
    ]


def test_a_model_without_a_plugin_comes_from_the_bridge_if_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, DEEPSEEK)
    with_bridge(monkeypatch)
    assert source_of(None, path) == "bridge"
    for version, python, cause in (
        (None, 12, "is not installed"),
        (BRIDGE_VERSION, 11, "needs Python 3.12, and this is 3.11"),
        ("0.5.0", 12, f"0.5.0 is installed, but the learner works with {BRIDGE_VERSION}"),
    ):
        with_bridge(monkeypatch, version, python)
        for mode, beginning in ((None, "no model plug-in is called 'deepseek_v3'"), ("bridge", "megatron_to_hf_mode")):
            with pytest.raises(UserError, match=f"{beginning}.*Megatron-Bridge {cause}.*run make setup-bridge"):
                source_of(mode, path)  # type: ignore[arg-type]


def test_a_model_that_was_not_compared_with_transformers_has_to_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bridge(monkeypatch)
    path = checkpoint(tmp_path, DEEPSEEK | {"model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"]})
    with pytest.raises(UserError, match=r"no model plug-in is called 'falcon_h1'.*set megatron_to_hf_mode to bridge"):
        source_of(None, path)
    assert source_of("bridge", path) == "bridge"


def test_a_family_that_nobody_knows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bridge(monkeypatch)
    path = checkpoint(tmp_path, DEEPSEEK | {"model_type": "wheel", "architectures": ["WheelForCausalLM"]})
    with pytest.raises(UserError, match="no model plug-in is called 'wheel'"):
        source_of(None, path)
    with pytest.raises(UserError, match=r"Megatron-Bridge 0\.6\.2 has no language model WheelForCausalLM"):
        source_of("bridge", path)


def test_the_text_part_of_a_model_that_also_takes_images_comes_from_the_bridge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bridge(monkeypatch)
    path = checkpoint(tmp_path, GEMMA3)
    assert [source_of(mode, path) for mode in (None, "bridge")] == ["bridge", "bridge"]
    with pytest.raises(UserError, match=r"no model plug-in is called 'gemma3'.*set megatron_to_hf_mode to bridge"):
        source_of("raw", path)
    assert problems(run_config(**RUN, hf_checkpoint=path), "train_async.py") == []
    with_bridge(monkeypatch, None)
    with pytest.raises(UserError, match=r"use Megatron-Bridge, which has Gemma3ForCausalLM: .*run make setup-bridge"):
        source_of(None, path)


def test_a_model_that_also_takes_images_is_refused_if_its_text_part_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bridge(monkeypatch)
    path = checkpoint(tmp_path, GEMMA3 | {"model_type": "wheel", "architectures": ["WheelForConditionalGeneration"]})
    [sentence] = problems(run_config(**RUN, hf_checkpoint=path), "train_async.py")
    assert sentence.startswith(f"hf_checkpoint {path} has the model_type wheel: no model plug-in is called 'wheel'")
    with pytest.raises(UserError, match="has no language model WheelForConditionalGeneration"):
        source_of("bridge", path)


@pytest.mark.parametrize("mode", [None, "raw", "bridge"])
def test_a_quantised_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    with_bridge(monkeypatch)
    path = checkpoint(tmp_path, QWEN3 | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(UserError, match=r"is quantised \(fp8\).*use a bfloat16 checkpoint"):
        source_of(mode, path)


def test_the_check_of_the_configuration_names_what_the_bridge_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RUN | {"hf_checkpoint": checkpoint(tmp_path, DEEPSEEK), "megatron_to_hf_mode": "bridge"}
    with_bridge(monkeypatch, None)
    [sentence] = problems(run_config(**settings), "train_async.py")
    assert sentence.startswith("megatron_to_hf_mode bridge: Megatron-Bridge is not installed: run make setup-bridge")
    with_bridge(monkeypatch)
    assert problems(run_config(**settings), "train_async.py") == []
    [sentence] = problems(run_config(**settings, expert_model_parallel_size=4, actor_num_gpus_per_node=4), "train.py")
    assert sentence.startswith("the model's 6 experts are not divisible by expert_model_parallel_size 4")


def test_the_shape_of_a_model_without_a_plugin_is_read_where_its_language_model_is_described(tmp_path: Path) -> None:
    pictures = {"model_type": "qwen3_5", "text_config": DEEPSEEK, "vision_config": {"hidden_size": 7}}
    shape = shape_of(Model(hf_checkpoint=checkpoint(tmp_path, pictures)))
    assert shape is not None
    assert shape.experts is not None
    assert (shape.hidden, shape.experts.count, shape.experts.width) == (64, 6, 32)
    unknown = {name: value for name, value in DEEPSEEK.items() if name != "hidden_size"}
    assert shape_of(Model(hf_checkpoint=checkpoint(tmp_path, unknown))) is None


def test_the_version_is_the_one_that_make_setup_bridge_installs() -> None:
    assert f"megatron-bridge=={BRIDGE_VERSION}" in (ROOT / "requirements/bridge.in").read_text().split()


@pytest.mark.parametrize("window, refused", [(100, True), (104, False), (None, False)])
def test_samples_that_exceed_the_window_of_a_mistral_are_refused(
    tmp_path: Path, window: int | None, refused: bool
) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    (tmp_path / "config.json").write_text(json.dumps(mistral))
    config = run_config(hf_checkpoint=str(tmp_path), rollout_max_prompt_len=40, rollout_max_response_len=64)
    said = [sentence for sentence in problems(config, "train_async.py") if "sliding window" in sentence]
    assert bool(said) is refused
    assert all("samples of up to 104 tokens exceed the sliding window 100" in sentence for sentence in said)
