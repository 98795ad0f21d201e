"""Trains in TRL's `GRPOTrainer`. Runs in the environment that `make bench-peers` installs, without this project.

    .venv-peers/bin/python benchmarks/peers/grpo_trainer.py JOB.json

`JOB.json` is a `TRLJob` of `benchmarks/peers/jobs.py`. The result is a file of one JSON object per optimizer step with
the keys `time` and `reward`; its first line has the time at which training began.

TRL runs with its defaults, apart from gradient checkpointing: without it, TRL is faster.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return 1 for a completion whose first token has an odd id, and 0 otherwise, as `jobs.parity` does."""
    return [float(ids[0] % 2) for ids in completion_ids]


def last_number(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """Return 1 for a completion whose last number is its label, and 0 otherwise, as `examples.last_number` does."""
    return [
        float(re.findall(r"-?\d+", text)[-1:] == [expected]) for text, expected in zip(completions, label, strict=True)
    ]


class StepLog(TrainerCallback):
    """Writes a line for each step, and ends training when the mean reward of `last` steps has reached `goal`."""

    def __init__(self, path: Path, goal: float | None, last: int) -> None:
        self._file = path.open("w", buffering=1)
        self._goal, self._last = goal, last
        self._rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write(time=time.time())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "reward" not in logs:  # the summary at the end
            return
        reward = float(logs["reward"])
        self._write(time=time.time(), reward=reward)
        self._rewards.append(reward)
        recent = self._rewards[-self._last :]
        if self._goal is not None and len(recent) == self._last and sum(recent) / self._last >= self._goal:
            control.should_training_stop = True

    def _write(self, **values: float) -> None:
        self._file.write(json.dumps(values) + "\n")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
            shuffle_dataset=False,
            per_device_train_batch_size=job["prompts_per_step"] * job["group_size"],
            num_generations=job["group_size"],
            max_completion_length=job["max_new_tokens"],
            generation_kwargs={"min_new_tokens": job["min_new_tokens"]},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **job["trainer"],
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
            reward_funcs={"parity": parity, "last_number": last_number}[job["reward"]],
            args=config,
            train_dataset=Dataset.from_list(job["prompts"]),
            callbacks=[StepLog(Path(job["result"]), job["goal"], job["goal_steps"])],
        )
        trainer.train()


if __name__ == "__main__":
    main()
