"""LoRA in ROLL's files: the trained section and that of the engines describe one adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.flags import parse_flags
from miles_async.config.load import checked_config
from miles_async.config.translation import Outcome, translate
from tests.launch_scripts.roll_files import JUDGE, roll_files

QKV = ["q_proj", "k_proj", "v_proj"]


def outcome(trained: Mapping[str, Any], loaded: Mapping[str, Any] | None = None, **others: Any) -> Outcome:
    """What a file means whose sections have these `model_args`."""
    sections = {"actor_train": {"model_args": trained}, "actor_infer": {"model_args": loaded or {}}}
    return translate({**sections, **others}, "ROLL")


def settings(*args: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    found = outcome(*args, **others)
    assert found.problems == []
    return {key.removeprefix("learner."): one.value for key, one in found.translation.items() if "lora" in key}


def test_the_adapter_is_that_of_both_sections() -> None:
    trained = {"lora_target": "linear_qkv, linear_proj", "lora_rank": 32, "lora_alpha": 16, "lora_dropout": 0.1}
    loaded = {"lora_target": "o_proj,q_proj,k_proj,v_proj", "lora_rank": 32, "lora_alpha": 16, "lora_dropout": 0.0}
    expected = {"lora_rank": 32, "lora_alpha": 16, "lora_dropout": 0.1, "lora_target_modules": [*QKV, "o_proj"]}
    assert settings(trained, loaded) == expected
    assert settings(trained) == expected
    assert settings(trained, loaded, reference={"model_args": loaded | {"lora_rank": 8}}) == expected


def test_what_a_file_does_not_set_has_rolls_defaults() -> None:
    assert settings({"lora_target": "q_proj,v_proj,k_proj"}) == {
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_target_modules": QKV,
    }
    assert settings({"lora_target": "all-linear", "lora_rank": 4}, {"lora_target": "all-linear", "lora_rank": 4}) == {
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["all-linear"],
    }


def test_layers_may_be_chosen_by_a_pattern() -> None:
    found = settings({"lora_target": ".*(q|v)_proj"})
    assert found["lora_target_modules"] == [".*(q|v)_proj"]


def test_without_a_target_nothing_is_adapted() -> None:
    found = outcome({"lora_target": None, "lora_rank": 32}, {"lora_alpha": 32})
    assert (found.problems, dict(found.translation)) == ([], {})
    why = "has no effect without lora_target"
    for key in ("actor_train.model_args.lora_rank", "actor_infer.model_args.lora_alpha"):
        assert found.idle[key] == why


def test_values_may_be_variables_of_the_file() -> None:
    variables = {"lora_target": "all-linear", "lora_rank": 64}
    section = {name: f"${{{name}}}" for name in variables}
    assert settings(section, section, **variables)["lora_rank"] == 64


@pytest.mark.parametrize(
    "trained, loaded, said",
    [
        (
            {"lora_target": "all-linear", "lora_rank": 32},
            {"lora_target": "all-linear", "lora_rank": 16},
            "actor_train.model_args.lora_rank 32 and actor_infer.model_args.lora_rank 16 contradict each other, "
            "because both set learner.lora_rank: set them to the same value",
        ),
        (
            {"lora_target": "linear_qkv", "lora_rank": 8},
            {"lora_target": "q_proj,v_proj", "lora_rank": 8},
            f"actor_train.model_args.lora_target {QKV} and actor_infer.model_args.lora_target ['q_proj', 'v_proj'] "
            "contradict each other, because both set learner.lora_target_modules: set them to the same value",
        ),
        (
            {"lora_rank": 8},
            {"lora_target": "all-linear"},
            "actor_infer.model_args.lora_target needs actor_train.model_args.lora_target: set both to the same value, "
            "or remove it",
        ),
        (
            {"lora_target": ".*(q|v)_prog"},
            {},
            "actor_train.model_args.lora_target: .*(q|v)_prog matches no linear layer that can have an adapter: use "
            "all-linear, or some of q_proj, k_proj, v_proj, o_proj, in_proj_qkv, in_proj_z, out_proj, gate_proj, "
            "up_proj, down_proj, lm_head, or a pattern of names such as model.layers.0.self_attn.q_proj",
        ),
        (
            {"lora_target": True},
            {},
            "actor_train.model_args.lora_target True is not a list of layers: write it as all-linear or q_proj,v_proj",
        ),
        (
            {"lora_target": "all-linear", "lora_rank": 0},
            {},
            "actor_train.model_args.lora_rank 0 is not a number of 1 or more: write a whole number",
        ),
        (
            {"lora_target": "all-linear", "additional_target": "lm_head"},
            {},
            "actor_train.model_args.additional_target 'lm_head' is not supported: adapters are trained, and nothing "
            "beside them: remove it",
        ),
    ],
)
def test_what_is_no_adapter_is_one_problem(trained: dict[str, Any], loaded: dict[str, Any], said: str) -> None:
    assert outcome(trained, loaded).problems == [said]


def test_rolls_dense_example_trains_its_adapter_on_devices_of_its_own(tmp_path: Path) -> None:
    """Devices that learner and engines share are the only thing that the file is refused for."""
    file = next(one for one in roll_files() if one.name == "qwen2.5-7B-rlvr_megatron-rlvr_config_lora")
    path = file.written(tmp_path, {"actor_infer.device_mapping": "list(range(8,16))"})
    config, refused = checked_config(parse_flags(["--config", str(path), *JUDGE]), entry="train.py")
    assert refused == []
    assert (config.learner.lora_rank, config.learner.lora_scale) == (64, 1.0)
    assert config.learner.lora_target_modules == ["all-linear"]
