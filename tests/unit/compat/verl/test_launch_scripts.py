"""Launch scripts of verl start with `--check-config` as they are, but for paths, GPU counts and the name of the engine.

Engines run SGLang here, so a script for vLLM needs `actor_rollout_ref.rollout.name=sglang`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from miles_async.compat.verl.rules import FLAGS, TABLE, rule_below
from miles_async.config import model_source
from miles_async.config.cli import parse_or_exit
from miles_async.config.translation import Combined, Idle, Only, Refused, Sets
from tests.launch_scripts.outcomes import ENGINE, SGLANG, Result, edits
from tests.launch_scripts.replay import Script, refusals, scripts
from workers.check_config import read_files

ALL = {script.name: script for script in scripts("verl")}
FULLY_ASYNC = "fully_async_policy-grpo_30b_a3b_base_math_megatron_96_32"
SAME = [TABLE[f"actor_rollout_ref.rollout.{name}"] for name in ("prompt_length", "response_length", "max_model_len")]
"""Rules of keys that repeat what other keys set."""
REASONS = {
    "FSDP": "the learner runs Megatron-core",
    "Megatron-FSDP": "the learner shards its optimizer only",
    "float16": "has no counterpart: set it to bfloat16",
    "FP8": "learner and engines compute in bf16",
    "TensorRT-LLM": "trtllm",
    "vLLM's arguments": "engine_kwargs.vllm",
    "NPU": "needs CUDA GPUs or CPUs",
    "images": "models are trained on text",
    "nothing is offloaded": "offloads nothing",
    "Hydra's files": "files of Hydra are not read",
    "Megatron-lite's optimizer": "megatron_args.offload_fraction",
    "transport of verl": "delta_sharded",
    "reward function": "write a function fn(args, sample)",
    "normalized weights": "weights are not normalized",
    "endless responses": "a response ends with the token",
    "shortest response": "responses may end at any token",
    "activations": "activations stay on the GPU",
    "untried engines": "nobody has tried --sglang",
    "small step": "is too small for",
}
"""What remains to be refused, and a part of the sentence."""
EXPECTED: Mapping[str, Sequence[str]] = {
    "dapo-run_dapo_qwen3_moe_30b_megatron_npu": [],
    "dapo-test_dapo_7b_math_megatron": [],
    "dapo-test_dapo_8b_megatron_fp16": ["float16"],
    "dapo-test_dapo_8b_megatron_fp8train": ["FP8"],
    "dapo-test_dapo_glm_air_megatron": [],
    "dapo-test_dapo_gptoss_20b_megatron": [],
    "dapo-test_dapo_qwen3_moe_30b_megatron_fp16": ["float16"],
    "dapo-test_dapo_qwen3next_80b_megatron": [],
    "fully_async_policy-grpo_30b_a3b_base_math_megatron_8_8_mis_trtllm": ["TensorRT-LLM"],
    "fully_async_policy-grpo_30b_a3b_base_math_megatron_96_32": [],
    "fully_async_policy-grpo_30b_a3b_base_math_megatron_96_32_mis": [],
    "fully_async_policy-grpo_8b_base_math_megatron_4_4_trtllm": ["TensorRT-LLM"],
    "fully_async_policy-grpo_qwen35_35b_megatron_async": [],
    "fully_async_policy-grpo_qwen3_235b_megatron_npu": ["NPU", "untried engines", "vLLM's arguments"],
    "grpo_trainer-run_deepseek_v3_671b_megatron": [],
    "grpo_trainer-run_moonlight_16b_a3b_megatron": [],
    "grpo_trainer-run_nemotron_nano_v3_30b_a3b_megatron": [],
    "grpo_trainer-run_qwen2-7b_math_megatron_fsdp": ["Megatron-FSDP"],
    "grpo_trainer-run_qwen3_235b_a22b_megatron": [],
    "grpo_trainer-run_qwen3_30b_a3b_megatron": [],
    "grpo_trainer-run_qwen3_5_122b_a10b_megatron": ["vLLM's arguments"],
    "grpo_trainer-run_qwen3_5_35b_megatron": [],
    "grpo_trainer-run_qwen3_5_397b_megatron": ["untried engines", "vLLM's arguments"],
    "grpo_trainer-run_qwen3_8b_megatron": [],
    "gspo_trainer-run_qwen3_30b_a3b_megatron": [],
    "one_step_off_policy-dapo_7b_math_megatron_4_12": [],
    "one_step_off_policy-dapo_7b_math_megatron_colocate": [],
}
"""The reasons for which a script on Megatron is refused with SGLang; none if it ends with exit code 0."""


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with Megatron-Bridge."""
    monkeypatch.setattr(model_source, "_bridge_complaint", lambda: None)


def runs_megatron(script: Script) -> bool:
    return any(".megatron." in row[0] for row in script.arguments)


def reasons(problems: Sequence[str]) -> Sequence[str]:
    """The names of the reasons in `REASONS`. Fails for a sentence that has none."""
    found: dict[str, None] = {}
    for sentence in problems:
        names = [name for name, part in REASONS.items() if part in sentence]
        assert names, sentence
        found[names[0]] = None
    return sorted(found)


@pytest.mark.parametrize("name", ALL)
def test_a_script_ends_as_expected(name: str, tmp_path: Path) -> None:
    script = ALL[name]
    found = reasons(refusals(script.command(tmp_path, edits(script)), script.entry))
    assert found == EXPECTED[name] if runs_megatron(script) else "FSDP" in found


@pytest.mark.parametrize("name", ALL)
def test_no_key_of_a_script_is_ignored_silently(name: str, tmp_path: Path) -> None:
    """Each key sets a setting, is named as without effect or refused, or has the one value that is allowed."""
    for key in Result.of(ALL[name], tmp_path).compared:
        flag = FLAGS.get(key.removeprefix("--").replace("-", "_"))
        rule = TABLE.get(key) or rule_below(key) if flag is None else flag.rule
        # A second key for the same setting may only have the same value.
        assert isinstance(rule, Only) or (isinstance(rule, Sets) and rule in SAME), key


def test_the_fully_asynchronous_example_needs_only_another_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ALL[FULLY_ASYNC]
    [problem] = refusals(script.command(tmp_path), script.entry)
    assert problem == f"{ENGINE} 'vllm' is not supported: the engines run SGLang: set it to sglang"
    for preset in ([], ["--preset", "verl"]):
        words = [*preset, *script.command(tmp_path, SGLANG), "--check-config"]
        with pytest.raises(SystemExit) as exited:
            parse_or_exit(words, script.entry, read_files=read_files)
        assert exited.value.code == 0, capsys.readouterr().err


def test_every_refusal_of_a_key_below_a_section_says_what_to_do() -> None:
    for script in ALL.values():
        for key in {row[0].lstrip("+~") for row in script.arguments}:
            rule = TABLE.get(key) or rule_below(key)
            assert not isinstance(rule, Refused) or "set " in rule.instead or "remove it" in rule.instead, key
            assert not isinstance(rule, Idle | Combined) or rule != Combined(), key
