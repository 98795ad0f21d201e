"""What recorded launch scripts mean here: `python -m tests.launch_scripts.outcomes slime miles verl` prints a table.

Each row has the script, the number of its flags or keys, how many of them are mapped to settings, compared with what a
run does, without effect and refused, and how `--check-config` ends: as the script is, but for paths, and with the edits
that are named. `--write` writes why each script is refused into `slime.json`, `miles.json` and `verl.json`, which tests
and pages read. `roll_files.py` does the same for ROLL's files.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_async.config import model_source
from miles_async.config.flags import parse_flags
from miles_async.rewards.functions import ifbench
from tests.launch_scripts.replay import Script, reasons, record_results, refusals, scripts

ENGINE = "actor_rollout_ref.rollout.name"
SGLANG: Mapping[str, str] = {ENGINE: "sglang"}
"""The edit of a script whose engines run vLLM."""
GPUS: Mapping[str, Mapping[str, str]] = {
    # The script names no number, and Miles takes 8.
    "formal_math-single_round-run_sft": {"--actor-num-gpus-per-node": "8"},
    # Megatron needs a multiple of expert_model_parallel_size 8 * pipeline_model_parallel_size 2.
    "run-glm4.7-30B-A3B": {"--actor-num-nodes": "2"},
    # Without expert_tensor_parallel_size, Megatron divides experts like the other layers, and needs more ranks.
    "dapo-test_dapo_qwen3_moe_30b_megatron_fp16": {"trainer.nnodes": "16"},
    "grpo_trainer-run_qwen3_235b_a22b_megatron": {"trainer.nnodes": "16"},
    "grpo_trainer-run_qwen3_30b_a3b_megatron": {"trainer.nnodes": "2"},
}
"""Numbers of GPUs for scripts whose layout Megatron refuses on theirs, or that name none."""
REASONS: Mapping[str, str] = {
    "low precision: FP8": "computes in bf16 or fp32",
    "distillation": "on-policy distillation is not supported",
    "images": "models are trained on text",
    "FSDP": "runs Megatron-core",
    "kernels that engine and learner share": "engines and learner use kernels of their own",
    "routing replay": "routing replay is not supported",
    "engines of several kinds": "--sglang-config would pass arguments that the run does not check",
    "a router for engines of several kinds": "does not fit the router that the run starts",
    "no key of Weights & Biases": "--wandb-key needs a value",
    "a layout that Megatron refuses": "are not divisible by",
    "rows without an answer": "needs the right answer",
}
"""Why scripts of slime and Miles are refused, and a part of the sentence."""
REASONS_OF_VERL: Mapping[str, str] = {
    "FSDP": "the learner runs Megatron-core",
    "Megatron-FSDP": "the learner shards its optimizer only",
    "low precision: float16": "has no counterpart: set it to bfloat16",
    "low precision: FP8": "learner and engines compute in bf16",
    "TensorRT-LLM": "trtllm",
    "vLLM's arguments": "engine_kwargs.vllm",
    "NPU": "needs CUDA GPUs or CPUs",
    "images": "models are trained on text",
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
"""Why scripts of verl are refused, and a part of the sentence."""


def edits(script: Script) -> Mapping[str, str]:
    """The keys that are changed, beside paths, with their values: the name of the engine and numbers of GPUs."""
    return {**(SGLANG if list(script.words(ENGINE)) == ["vllm"] else {}), **GPUS.get(script.name, {})}


def as_words(changed: Mapping[str, str]) -> str:
    """Changed flags and overrides as words of a command line."""
    return " ".join(f"{key} {value}" if key.startswith("--") else f"{key}={value}" for key, value in changed.items())


@dataclass(frozen=True)
class Result:
    """What the keys of a script mean here."""

    mapped: Sequence[str]
    without_effect: Sequence[str]
    refused: Sequence[str]
    compared: Sequence[str]

    @classmethod
    def of(cls, script: Script, folder: Path) -> Result:
        """The keys of a script, whose paths are in `folder`."""
        flags = parse_flags(script.command(folder))
        refused = " ".join(flags.problems)
        sources = {word for one in flags.assignments for word in one.source.split()}
        kinds: dict[str, list[str]] = {name: [] for name in ("mapped", "without_effect", "refused", "compared")}
        for key in dict.fromkeys(row[0].lstrip("+~") for row in script.arguments):
            if re.search(rf"{re.escape(key)}(?![\w.])", refused):
                kinds["refused"].append(key)
            elif key in sources:
                kinds["mapped"].append(key)
            else:
                kinds["without_effect" if key in flags.idle else "compared"].append(key)
        return cls(**kinds)


def results(project: str) -> dict[str, list[str]]:
    """Why each script of a project is refused, see `reasons`; with `edits`."""
    names = REASONS_OF_VERL if project == "verl" else REASONS
    found = {}
    for script in scripts(project):
        with tempfile.TemporaryDirectory() as folder:
            command = script.command(Path(folder), edits(script))
            found[script.name] = reasons(refusals(command, script.entry), names)
    return found


def main() -> None:
    # Models of Megatron-Bridge and rewards of IFBench are checked as if both were installed.
    model_source._bridge_complaint = lambda: None
    ifbench.lacking = lambda: None
    projects = [word for word in sys.argv[1:] if word != "--write"]
    if "--write" in sys.argv:
        for project in projects:
            record_results(project, results(project))
        return
    print("script | flags | mapped | compared | without effect | refused | --check-config")
    for script in (script for project in projects for script in scripts(project)):
        with tempfile.TemporaryDirectory() as folder:
            result = Result.of(script, Path(folder))
            ends = _end(refusals(script.command(Path(folder)), script.entry))
            if changed := edits(script):
                words = as_words(changed)
                ends += f"; with {words} {_end(refusals(script.command(Path(folder), changed), script.entry))}"
        counts = map(len, (result.mapped, result.compared, result.without_effect, result.refused))
        keys = len({row[0].lstrip("+~") for row in script.arguments})
        print(" | ".join(map(str, (script.name, keys, *counts, ends))))


def _end(sentences: Sequence[str]) -> str:
    return f"exit 2 (problems: {len(sentences)})" if sentences else "exit 0"


if __name__ == "__main__":
    main()
