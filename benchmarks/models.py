"""Trains a tiny model of every family of `tests/bridge` for ten steps, with the engine, the learner and the publish.

    .venv-bridge/bin/python -m benchmarks.models [--only NAME ...]

Each run is `train_async.py` with random weights. The weights are exported after every step, and transformers computes
the log-probabilities of the sampled tokens from the exports: of each response that one version sampled, under that
version. So the figure compares engine, learner, publish and export. A family whose engine does not start on a CPU has
the reason instead. Prints a line per family and writes benchmarks/results/models.json, from which the documentation
makes its table of models.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.records import record, recorded
from benchmarks.settings import TRAINING
from miles_async.adapters.storage.rollout_file import load_groups
from miles_async.models.plugin import MODELS
from miles_async.types import Sample
from tests.bridge.families import FAMILIES, class_of, write_checkpoint

STEPS = 10
SETTINGS: Mapping[str, Any] = {
    **TRAINING,
    "reasoning_gym_task": "chain_sum",
    "prompt_template": "{expression}",
    "num_rollout": STEPS,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 8,
    "custom_rm_path": "benchmarks.models.is_even",
    "max_weight_staleness": 1,
    "lr": 1e-3,
    "save_interval": 1,
}
ADDED_TO_CONFIG: Mapping[str, Mapping[str, Any]] = {
    # Published checkpoints have these, SGLang reads them, and the classes of transformers do not write them.
    "DeepSeek-V2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "DeepSeek-V3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "Gemma 2": {"hidden_act": "gelu_pytorch_tanh"},
    "Kimi K2": {"moe_layer_freq": 1, "topk_method": "noaux_tc"},
    "MiniMax-M2": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "Qwen3-Next": {"full_attention_interval": 4},
    "Qwen3.5": {"full_attention_interval": 4},
    "Qwen3.5-MoE": {"full_attention_interval": 4},
    "Qwen3.5, images": {"full_attention_interval": 4},
    "Qwen3.5-MoE, images": {"full_attention_interval": 4},
    "gpt-oss": {"swiglu_limit": 7.0},
}
COMPLAINT = "train_async.py: "
"""The beginning of the line that says why a run ended."""


async def is_even(args: Any, sample: Sample) -> float:
    """A reward that differs between the samples of a group whose tokens are random."""
    return float(sum(sample.tokens) % 2 == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), metavar="NAME", default=list(FAMILIES))
    results = recorded("models")
    for name in parser.parse_args().only:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = described(name) | train(name, Path(folder))
        print(json.dumps({name: results[name]}), flush=True)
        record("models", {known: results[known] for known in FAMILIES if known in results})


def described(name: str) -> dict[str, Any]:
    """Where the learner can take a model of the family from, and the layouts of `tests/bridge`."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)
    architecture = family.architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    sources = ["plug-in", "Megatron-Bridge"] if MODELS.has(config.model_type) else ["Megatron-Bridge"]
    return {"architecture": architecture, "sources": sources, "layouts": ["one rank", *family.layouts]}


def add_to_config(checkpoint: Path, added: Mapping[str, Any]) -> None:
    """Add keys to `config.json`: to its text part, if the model also takes images."""
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    config.get("text_config", config).update(added)
    file.write_text(json.dumps(config))


def train(name: str, folder: Path) -> dict[str, Any]:
    """Train a model of the family: the transport and the greatest difference in nats, or the reason why it did not."""
    checkpoint = write_checkpoint(name, folder / "checkpoint")
    add_to_config(checkpoint, ADDED_TO_CONFIG.get(name, {}))
    command = [sys.executable, "train_async.py", "--run-dir", str(folder / "run"), "--hf-checkpoint", str(checkpoint)]
    command += ["--save-hf", f"{folder}/version_{{rollout_id}}"]
    command += ["--save-debug-rollout-data", f"{folder}/rollout_{{rollout_id}}"]
    for setting, value in SETTINGS.items():
        command += [f"--{setting.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reasons = [line.removeprefix(COMPLAINT) for line in done.stderr.splitlines() if line.startswith(COMPLAINT)]
        return {"failed": re.sub(r" \(log: .*\)", "", reasons[-1]) if reasons else done.stderr[-300:]}
    summary = json.loads((folder / "run" / "latest" / "summary.json").read_text())
    compared, furthest = compare(folder, class_of(FAMILIES[name].architecture))
    return {"steps": summary["rollouts"], "transport": summary["weight_transfer"]} | {
        "compared_tokens": compared,
        "difference": furthest,
    }


@torch.no_grad()
def compare(folder: Path, opened_by: Any) -> tuple[int, float]:
    """Number of tokens, and the greatest difference of their log-probabilities between engine and transformers.

    `opened_by` is the class in transformers that opens the exports.
    """
    compared, furthest = 0, 0.0
    models: dict[int, PreTrainedModel] = {}
    for path in sorted(folder.glob("rollout_*")):
        for sample in (sample for group in load_groups(path)[1] for sample in group):
            # The export after step n holds version n + 1.
            if len(sample.spans) != 1 or (version := sample.spans[0].version) == 0:
                continue
            if version not in models:
                exported = folder / f"version_{version - 1}"
                models[version] = opened_by.from_pretrained(exported, dtype=torch.float32)
            tokens = torch.tensor(list(sample.tokens))
            logprobs = models[version](tokens[None]).logits[0, :-1].log_softmax(-1)
            computed = logprobs.gather(1, tokens[1:, None])[-sample.response_length :, 0]
            reported = torch.tensor(list(sample.rollout_log_probs))
            furthest = max(furthest, (computed - reported).abs().max().item())
            compared += sample.response_length
    return compared, furthest


if __name__ == "__main__":
    main()
