"""Arguments of SGLang that were never tried are refused until the user names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miles_async.config.checks import notes, problems
from miles_async.config.flags import parse_flags
from miles_async.config.server_args import known_arguments
from miles_async.config.untested import (
    UNTESTED,
    drafts_from_heads,
    loaded_by_name,
    untested_arguments,
    weight_transport,
)
from miles_async.observability.page.status import status
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.summary import summarize, summary_text
from miles_async.observability.view import RunView
from tests.configuration import build, read_yaml, run_config
from tests.unit.example_events import RUN
from workers.driver import run_started
from workers.specs import engine_spec

ROOT = Path(__file__).parents[3]
GENERATION = {"n_samples_per_prompt": 8, "rollout_max_response_len": 8}
RUNNABLE = {"reasoning_gym_task": "chain_sum", "rm_type": "reasoning_gym", **GENERATION}


def refusals(*allowed: str, **arguments: Any) -> list[str]:
    run = run_config(**RUNNABLE, sglang_server_args=arguments, allow_untested=list(allowed))
    return problems(run, "train_async.py")


@pytest.mark.parametrize(
    "name, argument, value",
    [
        ("quantization", "quantization", "fp8"),
        ("quantization", "modelopt_quant", "nvfp4"),
        ("kv_cache_dtype", "kv-cache-dtype", "fp8_e4m3"),
        ("dtype", "dtype", "float16"),
        ("disaggregation", "disaggregation-mode", "prefill"),
        ("lora", "enable_lora", True),
        ("lora", "max_lora_rank", 64),
        ("data_parallelism", "dp_size", 2),
        ("model_parallelism", "enable_eplb", True),
        ("model_parallelism", "pipeline-parallel-size", 2),
        ("weight_memory", "cpu_offload_gb", 8),
        ("weight_memory", "load_format", "gguf"),
        ("weight_memory", "attention_backend", "intel_amx"),
        ("external_kv_cache", "enable_hierarchical_cache", True),
        ("sampling", "preferred_sampling_params", {"top_k": 20}),
        ("model_override", "json_model_override_args", '{"num_hidden_layers": 2}'),
        ("model_override", "model_impl", "transformers"),
    ],
)
def test_an_untested_argument_is_refused_with_the_flag_that_allows_it(name: str, argument: str, value: Any) -> None:
    (sentence,) = refusals(**{argument: value})
    flag = f"--sglang-{argument.replace('_', '-')}"
    assert sentence.startswith(f"nobody has tried {flag} with miles_async: ")
    assert sentence.endswith(f"; unset this, or add --allow-untested {name}")
    assert refusals(name, **{argument: value}) == []
    assert refusals(*(other for other in UNTESTED if other != name), **{argument: value}) != []


@pytest.mark.parametrize(
    "argument, value",
    [
        ("quantization", None),
        ("kv_cache_dtype", "auto"),
        ("dtype", "bfloat16"),
        ("dtype", "float32"),
        ("enable_lora", False),
        ("ep_size", 1),
        ("cpu_offload_gb", 0),
        ("load_format", "safetensors"),
        ("attention_backend", "triton"),
        ("model_impl", "sglang"),
        ("disable_cuda_graph", True),
        ("enable_mixed_chunk", True),
        ("enable_deterministic_inference", True),
    ],
)
def test_values_that_turn_an_argument_off_and_arguments_that_only_change_the_speed_are_passed_on(
    argument: str, value: Any
) -> None:
    assert refusals(**{argument: value}) == []


def test_one_refusal_names_everything_that_has_to_be_allowed_and_was_allowed_before() -> None:
    sentences = refusals("lora", enable_lora=True, quantization="fp8", kv_cache_dtype="fp8_e5m2")
    assert [sentence.split()[3] for sentence in sentences] == ["--sglang-quantization", "--sglang-kv-cache-dtype"]
    assert all(sentence.endswith("add --allow-untested lora quantization kv_cache_dtype") for sentence in sentences)


def test_arguments_that_belong_together_are_refused_in_one_sentence() -> None:
    (sentence,) = refusals(enable_lora=True, max_lora_rank=8)
    assert "--sglang-enable-lora --sglang-max-lora-rank with" in sentence


NOTED: dict[str, dict[str, Any]] = {
    "speculative_decoding": {"speculative_algorithm": "EAGLE"},
    "attention_data_parallelism": {"enable_dp_attention": True, "dp_size": 2},
    "expert_parallelism": {"ep_size": 2},
}


@pytest.mark.parametrize("name", NOTED)
def test_arguments_whose_effect_the_run_measures_are_noted_until_they_are_allowed(name: str) -> None:
    assert refusals(**NOTED[name]) == []
    run = run_config(**RUNNABLE, sglang_server_args=NOTED[name])
    (sentence,) = [note for note in notes(run, "train_async.py") if note.startswith("nobody has tried")]
    assert f"--sglang-{next(iter(NOTED[name])).replace('_', '-')}" in sentence
    allowed = run_config(**RUNNABLE, sglang_server_args=NOTED[name], allow_untested=[name])
    assert not any(note.startswith("nobody has tried") for note in notes(allowed, "train_async.py"))


@pytest.mark.parametrize("arguments", [NOTED["attention_data_parallelism"], NOTED["expert_parallelism"]])
def test_weights_of_another_layout_are_loaded_by_name(arguments: dict[str, Any]) -> None:
    def transport(on_gpus: bool = True, **settings: Any) -> str:
        return weight_transport(run_config(**RUNNABLE, sglang_server_args=arguments, **settings), on_gpus=on_gpus)

    run = run_config(**RUNNABLE, sglang_server_args=arguments)
    assert str(loaded_by_name(run)).endswith("was never tried")
    assert transport() == "broadcast"
    assert transport(weight_transfer="disk") == "disk"
    assert transport(colocate=True) == "ipc"
    assert transport(colocate=True, actor_num_nodes=2) == "disk", "NCCL forms no group of two processes on one GPU"
    assert transport(on_gpus=False, colocate=True) == "broadcast"
    (note,) = [note for note in notes(run, "train_async.py") if note.startswith("nobody has tried")]
    assert "weight_transfer broadcast lets SGLang's loader load each version" in note


def test_a_layout_that_the_user_allows_needs_no_loader() -> None:
    run = run_config(**RUNNABLE, sglang_server_args={"ep_size": 2}, allow_untested=["expert_parallelism"])
    assert loaded_by_name(run) is None
    assert weight_transport(run, on_gpus=True) == "p2p"


@pytest.mark.parametrize("transport", ["p2p", "memory", "disk_delta", "auto"])
def test_a_transport_that_writes_into_the_memory_of_another_layout_is_refused(transport: str) -> None:
    settings: dict[str, Any] = {**RUNNABLE, "sglang_server_args": {"ep_size": 2}, "weight_transfer": transport}
    assert problems(run_config(**settings), "train_async.py") == [
        f"weight_transfer {transport} writes into the engines' memory, but how --sglang-ep-size divides it was never "
        "tried: set weight_transfer to broadcast or disk, or unset it, or add --allow-untested expert_parallelism"
    ]
    assert problems(run_config(**settings, allow_untested=["expert_parallelism"]), "train_async.py") == []


def test_an_unknown_name_is_refused_with_a_similar_one() -> None:
    (sentence,) = refusals("quantisation")
    assert sentence.startswith("allow_untested 'quantisation' is unknown; did you mean quantization?")


def test_the_command_line_and_yaml_allow_arguments(tmp_path: Path) -> None:
    flags = ["--sglang-enable-lora", "--sglang-quantization", "fp8", "--allow-untested", "lora", "quantization"]
    run = build(parse_flags(flags).assignments)
    assert run.engine.allow_untested == ["lora", "quantization"]
    assert untested_arguments(run) == {"lora": ["--sglang-enable-lora"], "quantization": ["--sglang-quantization"]}
    file = tmp_path / "my.yaml"
    file.write_text("engine: {allow_untested: [lora]}")
    assert build(read_yaml(file)).engine.allow_untested == ["lora"]


ADAPTER: dict[str, Any] = {**RUNNABLE, "lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    "argument, value",
    [
        ("enable_lora", True),
        ("max_lora_rank", 8),
        ("max_lora_rank", 16),
        ("lora_target_modules", ["all"]),
        ("lora_target_modules", ["k_proj", "q_proj", "v_proj"]),
        ("max_loras_per_batch", 8),
        ("max_loaded_loras", 8),
    ],
)
def test_a_run_that_trains_an_adapter_takes_values_that_leave_room_for_it_and_uses_its_own(
    argument: str, value: Any
) -> None:
    run = run_config(**ADAPTER, sglang_server_args={argument: value})
    assert problems(run, "train.py") == []
    flag = f"--sglang-{argument.replace('_', '-')}"
    assert [note for note in notes(run, "train.py") if "lora_rank" in note] == [
        f"a run with lora_rank sets {flag} itself, and your values leave room for its own: they have no effect"
    ]
    assert untested_arguments(run) == {}
    assert engine_spec(run, "e0", "folder", Path("logs")).server_args == {}


def test_how_engines_compute_the_adapter_is_passed_on() -> None:
    run = run_config(**ADAPTER, sglang_server_args={"lora_backend": "triton"})
    assert problems(run, "train.py") == []
    assert [note for note in notes(run, "train.py") if "lora" in note] == [
        "--sglang-lora-backend: engines on GPUs get this; engines on CPUs use lora_backend torch_native"
    ]
    assert engine_spec(run, "e0", "folder", Path("logs")).server_args == {"lora_backend": "triton"}


@pytest.mark.parametrize(
    "argument, value",
    [
        ("max_lora_rank", 4),
        ("lora_target_modules", ["q_proj"]),
        ("max_loras_per_batch", 2),
        ("max_loaded_loras", 2),
        ("lora_paths", ["another"]),
    ],
)
def test_a_run_that_trains_an_adapter_refuses_values_without_room_for_it_and_other_adapters(
    argument: str, value: Any
) -> None:
    found = problems(run_config(**ADAPTER, sglang_server_args={argument: value}), "train.py")
    assert f"nobody has tried --sglang-{argument.replace('_', '-')} with miles_async" in found[-1]


@pytest.mark.parametrize("name", UNTESTED)
def test_every_group_matches_an_argument_of_the_installed_sglang(name: str) -> None:
    pattern = re.compile(UNTESTED[name].assignments)
    values = ("8", "float16")
    assert any(pattern.fullmatch(f"{argument}={value}") for argument in known_arguments() for value in values)


def test_the_first_event_the_summary_and_the_page_name_the_untested_arguments(tmp_path: Path) -> None:
    run = run_config(**RUNNABLE, sglang_server_args={"enable_lora": True}, allow_untested=["lora"])
    event = run_started(run, RunFolder(tmp_path / "run"), "train_async.py", "a model")
    assert event.untested == ("--sglang-enable-lora",)
    view = RunView()
    view.apply(event)
    assert summarize(view)["untested"] == ["--sglang-enable-lora"]
    assert "untested" in summary_text(view)
    assert status(view, event.time)["notices"][-1]["text"] == (
        "SGLang's arguments --sglang-enable-lora were never tried"
    )


def test_a_run_without_untested_arguments_does_not_mention_them() -> None:
    view = RunView()
    view.apply(RUN)
    assert summarize(view)["untested"] == []
    assert "untested" not in summary_text(view)
    assert status(view, RUN.time)["notices"] == []


def test_the_documentation_lists_every_group() -> None:
    text = (ROOT / "docs/explanation/engines.md").read_text()
    _, _, section = text.partition("## Arguments that were never tried")
    rows = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == list(UNTESTED)


@pytest.mark.parametrize(
    "arguments, drafts",
    [
        ({"speculative_algorithm": "EAGLE"}, True),
        ({"speculative_algorithm": "nextn"}, True),
        ({"speculative_algorithm": "EAGLE3"}, False),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "other"}, False),
        ({}, False),
    ],
)
def test_engines_that_draft_from_trained_heads_get_them_in_whatever_case_their_algorithm_is_written(
    arguments: dict[str, Any], drafts: bool
) -> None:
    run = run_config(**RUNNABLE, sglang_server_args=arguments, enable_mtp_training=True)
    assert drafts_from_heads(run) is drafts
    assert (loaded_by_name(run) == "only SGLang's loader brings trained MTP heads to the draft model") is drafts
