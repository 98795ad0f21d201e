"""Recorded configuration files of ROLL, and what each means here.

`python -m tests.launch_scripts.roll_files` prints a table of all files, and `--write` writes `roll.json`. Nothing is
changed but paths, and files with a judge get its address: the model has a `config.json` with the dimensions of the
checkpoint and a tokenizer, and each file of rows has rows with a tag of the file's domain. A key of Weights & Biases is
set.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import yaml

from miles_async.compat.roll.table import TABLE
from miles_async.config import model_source
from miles_async.config.hydra import composed
from miles_async.config.translation import Only, Outcome, Sets, entries, translate
from tests.launch_scripts.replay import (
    MODELS,
    Recording,
    reasons,
    record_results,
    recordings,
    refusals,
    write_checkpoint,
)

JUDGE = ("--rm-url", "http://judge:8000/v1/chat/completions")
"""The address of a judge, which ROLL starts itself."""
KEYS = {"WANDB_API_KEY": "a key"}
"""Variables with the keys of services, to which files refer."""
_DIMENSIONS: Mapping[str, tuple[int, int, int, int, int]] = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 4864),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944),
    "Qwen3-1.7B": (28, 2048, 16, 8, 6144),
    "Qwen3-4B": (36, 2560, 32, 8, 9728),
    "Qwen3-8B": (36, 4096, 32, 8, 12288),
    "Qwen3-30B": (48, 2048, 32, 4, 6144),
    "Qwen3-235B": (94, 4096, 64, 4, 12288),
    "Qwen3-Next-80B": (48, 2048, 16, 2, 5120),
    "Qwen3.5-2B": (24, 2048, 8, 2, 6144),
    "Qwen3.5-27B": (64, 5120, 24, 4, 17408),
    "Qwen3.5-35B": (40, 2048, 16, 2, 512),
    "Qwen3.5-122B": (48, 3072, 32, 2, 1024),
    "Qwen3.5-397B": (60, 4096, 32, 2, 1024),
}
"""Layers, hidden size, heads, groups of keys and values, and feed-forward size by the name of a checkpoint."""
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
REASONS: Mapping[str, str] = {
    "images": "DetectionRewardWorker",
    "FSDP": "the learner runs Megatron-core: set it to megatron_train",
    "Ulysses": "ulysses_size",
    "low precision: float16": "'fp16' has no counterpart",
    "a loss of 0": "rl_loss_coef 0",
    "a tracker that ROLL does not have": "track_with",
}
"""What remains to be refused, and a part of the sentence."""
_TAGS = {
    "code": "KodCode",
    "llm_judge": "RLVR",
    "ifeval": "ifeval",
    "CrossThink": "crossthinkqa",
    "mmmath": "mm_math",
    "test_math": "mm_math",
    "v3det": "v3det_train",
    "test_detection": "v3det_train",
}
"""A part of the name of a file of rows, and a tag of its rows. Rows of other files have a tag of `math_rule`."""


class RollFile(Recording):
    """One recorded configuration file."""

    @property
    def entry(self) -> str:
        """Our program that runs the file."""
        return "train_async.py" if self.files[self.path].get("async_generation_ratio") else "train.py"

    def written(self, folder: Path, edits: Mapping[str, Any] | None = None) -> Path:
        """The path of the file below `folder`, with existing paths and the values of `edits` at dotted keys."""
        for path, content in self.files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            changed = self._changed(content, folder) if path == self.path else content
            for key, value in (edits or {}).items() if path == self.path else ():
                *parents, last = key.split(".")
                section = changed
                for parent in parents:
                    section = section[parent]
                section[last] = value
            target.write_text(yaml.safe_dump(changed, sort_keys=False))
        return folder / self.path

    def content(self, folder: Path) -> dict[str, Any]:
        """The content with that of the included files."""
        path = self.written(folder)
        return composed(yaml.safe_load(path.read_text()), path)

    @patch.dict(os.environ, KEYS)
    def refusals(self, folder: Path) -> list[str]:
        """What `--check-config` refuses, without the path of the file."""
        path = self.written(folder)
        judge = JUDGE if "LLMJudgeRewardWorker" in json.dumps(self.files) else ()
        found = refusals(["--config", str(path), *judge], self.entry)
        return [sentence.removeprefix(f"{path}: ") for sentence in found]

    def reasons(self, folder: Path) -> list[str]:
        """Why the file is refused, see `reasons`."""
        return reasons(self.refusals(folder), REASONS)

    def _changed(self, content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        changed: dict[str, Any] = json.loads(json.dumps(content))
        changed["pretrain"] = changed["reward_pretrain"] = str(self._checkpoint(folder / "model"))
        changed.setdefault("checkpoint_config", {})["output_dir"] = str(folder / "save")
        for data in (changed.get("actor_train", {}).get("data_args"), changed.get("validation", {}).get("data_args")):
            if data and "file_name" in data:
                data["file_name"] = [self._rows(folder, file) for file in data["file_name"]]
        return changed

    def _rows(self, folder: Path, file: str) -> str:
        path = folder / "data" / f"{Path(file).stem}.jsonl"
        path.parent.mkdir(exist_ok=True)
        tag = next((tag for part, tag in _TAGS.items() if part in file), "deepmath_103k")
        messages = json.dumps([{"role": "user", "content": "1 + 1"}])
        answers = {"ground_truth": "2", "test_cases": '[{"assert_code": "assert True"}]'}
        row = {"id": "1", "prompt": "1 + 1", "messages": messages, **answers, "tag": tag}
        path.write_text((json.dumps(row) + "\n") * 8)
        return str(path)

    def _checkpoint(self, folder: Path) -> Path:
        kind, architecture = MODELS[self.family]
        size = next(dimensions for name, dimensions in _DIMENSIONS.items() if re.match(rf"{name}\b", self.checkpoint))
        names = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads intermediate_size".split()
        config: dict[str, Any] = {
            **dict(zip(names, size, strict=True)),
            "head_dim": 128,
            "vocab_size": 151936,
            "hidden_act": "silu",
            "max_position_embeddings": 262_144,
            **(_EXPERTS if "MoE" in self.family or "Next" in self.family else {}),
        }
        if "images" in self.family:
            config = {"text_config": {**config, "model_type": f"{kind}_text"}}
        write_checkpoint(folder, {**config, "model_type": kind, "architectures": [architecture]})
        return folder


def roll_files() -> list[RollFile]:
    """All recorded files."""
    return recordings(RollFile, "roll")


def kinds(outcome: Outcome, content: Mapping[str, Any]) -> dict[str, str]:
    """What becomes of each key of a file: `mapped`, `compared`, `without effect`, `refused` or `ignored`."""
    said = " ".join(outcome.problems)
    sources = " ".join(entry.key for entry in outcome.translation.values())
    found = {}
    for key, _ in entries(content, TABLE):
        rule = TABLE.get(key)
        below = re.compile(rf"(?<![\w.]){re.escape(key)}\b")
        if below.search(said):
            found[key] = "refused"
        elif any(below.match(idle) for idle in outcome.idle):
            found[key] = "without effect"
        elif isinstance(rule, Sets) or below.search(sources):
            found[key] = "mapped"
        else:
            found[key] = "compared" if isinstance(rule, Only) else "ignored"
    return found


def table() -> str:
    """A row for each file: keys by what becomes of them, and why `--check-config` refuses the file, or `exit 0`."""
    columns = ("mapped", "compared", "without effect", "refused", "ignored")
    lines = [f"| file | keys | {' | '.join(columns)} | result |", "|---|---|" + "---|" * (len(columns) + 1)]
    for file in roll_files():
        with TemporaryDirectory() as folder:
            content = file.content(Path(folder))
            counts = Counter(kinds(translate(content, "ROLL"), content).values())
            result = ", ".join(file.reasons(Path(folder))) or "exit 0"
        numbers = " | ".join(str(counts[column]) for column in columns)
        lines.append(f"| {file.path} | {counts.total()} | {numbers} | {result} |")
    return "\n".join(lines)


def results() -> dict[str, list[str]]:
    """The reasons of each file by its name."""
    found = {}
    for file in roll_files():
        with TemporaryDirectory() as folder:
            found[file.name] = file.reasons(Path(folder))
    return found


if __name__ == "__main__":
    model_source._bridge_complaint = lambda: None  # as with Megatron-Bridge, which some families need
    if "--write" in sys.argv:
        record_results("roll", results())
    else:
        sys.stdout.write(table() + "\n")
