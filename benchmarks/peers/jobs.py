"""The jobs that run both in TRL's `GRPOTrainer` and in this project."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learner_step import SMOLLM2_SHAPE
from benchmarks.settings import TRAINING
from miles_async.config.losses import clip_range
from miles_async.events import ClusterReady, StepEnded
from miles_async.modes.shipped import Stream
from miles_async.observability.trace.event_log import read_events
from miles_async.types import Sample

TRL_PYTHON = Path(".venv-peers/bin/python")
TRAINER = Path(__file__).with_name("grpo_trainer.py")
THREADS = 2

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 44, 12
TRL_WARM_UP, OUR_WARM_UP = 1, 3
"""Steps that are not measured. In an asynchronous run the first batches were generated before training began."""

GOAL = 0.7
GOAL_STEPS = 5
"""The goal is reached when the mean reward of this many consecutive batches is at least `GOAL`."""
GOAL_JOB = ["--config", "configs/smollm2-cpu.yaml", "--num-rollout", "60", "--eval-size", "0"]
"""The job of `make run`, without evaluation and with more batches than the goal needs."""


@dataclass(frozen=True, kw_only=True)
class TRLJob:
    """What `grpo_trainer.py` reads."""

    model: str
    prompts: list[dict[str, str]]
    """Rows with `prompt` and `label`, in the order of training."""
    prompts_per_step: int
    group_size: int
    min_new_tokens: int
    max_new_tokens: int
    reward: str
    trainer: dict[str, Any]
    """Further arguments of `GRPOConfig`."""
    goal: float | None = None
    goal_steps: int = GOAL_STEPS
    threads: int = THREADS


@dataclass(frozen=True)
class Steps:
    """When training began and each optimizer step ended, in seconds, and the mean reward of each step's batch."""

    began: float
    times: list[float]
    rewards: list[float]

    def seconds_per_step(self, warm_up: int) -> float:
        """Mean over the steps after the first `warm_up` ones."""
        measured = self.times[warm_up - 1 :]
        return (measured[-1] - measured[0]) / (len(measured) - 1)

    def seconds_to_goal(self) -> float | None:
        """Seconds from the beginning of training until the goal was reached, or None if it was not."""
        for step in range(GOAL_STEPS, len(self.rewards) + 1):
            if fmean(self.rewards[step - GOAL_STEPS : step]) >= GOAL:
                return self.times[step - 1] - self.began
        return None


def parity(args: Any, sample: Sample) -> float:
    """Return 1 if the id of the first sampled token is odd, and 0 otherwise: nearly every group then has a gradient."""
    return float(sample.tokens[-sample.response_length] % 2)


def measure_step(trl_steps: int, our_steps: int, *, small: bool) -> dict[str, Any]:
    """Seconds per step of a model with the shape of SmolLM2-135M, generation included.

    The weights are random, so all tokens have about the same probability, and the engine ends a sequence early only
    once in 49,152 tokens. TRL never does.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        create_model(folder / "model", small=small)
        draw = random.Random(0)
        count = PROMPTS * (trl_steps + our_steps + 2)
        rows = [
            {"prompt": "".join(draw.choices(string.ascii_lowercase, k=PROMPT_TOKENS)), "label": ""}
            for _ in range(count)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = {
            "--hf-checkpoint": folder / "model",
            "--prompt-data": folder / "prompts.jsonl",
            "--input-key": "prompt",
            "--label-key": "label",
            "--custom-rm-path": f"{__name__}.parity",
            "--rollout-batch-size": PROMPTS,
            "--n-samples-per-prompt": GROUP_SIZE,
            "--rollout-max-response-len": NEW_TOKENS,
            "--num-rollout": our_steps,
            "--max-weight-staleness": 1,
            "--eval-size": 0,
            **{f"--{name.replace('_', '-')}": value for name, value in TRAINING.items()},
        }
        result = {
            "ours": run_ours([str(word) for flag in flags.items() for word in flag]).seconds_per_step(OUR_WARM_UP)
        }
        if TRL_PYTHON.exists():
            job = TRLJob(
                model=str(folder / "model"),
                prompts=rows,
                prompts_per_step=PROMPTS,
                group_size=GROUP_SIZE,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
                reward="parity",
                trainer={"max_steps": trl_steps, "learning_rate": 1e-6},
            )
            result["TRL"] = run_trl(job).seconds_per_step(TRL_WARM_UP)
            result["TRL / ours"] = result["TRL"] / result["ours"]
    return result


def measure_reward(*, small: bool) -> dict[str, Any]:
    """Seconds until SmolLM2-135M-Instruct has reached the goal in the job of `make run`, from the first prompt on.

    None if the run ended before. `small` ends both runs after as many steps as the goal needs at least. TRL gets the
    same prompts in the same order.
    """
    from miles_async.adapters.datasets.factory import open_data
    from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
    from miles_async.adapters.storage.gguf import with_converted_checkpoint
    from miles_async.config.load import load_config

    flags = [*GOAL_JOB, "--num-rollout", str(GOAL_STEPS)] if small else GOAL_JOB
    config = with_converted_checkpoint(load_config(flags, entry="train_async.py"))
    result: dict[str, Any] = {"ours": run_ours(flags, stop_at_goal=True).seconds_to_goal()}
    if not TRL_PYTHON.exists():
        return result
    rollout, learner = config.rollout, config.learner
    assert config.model.hf_checkpoint is not None
    data = open_data(config, tokenizer=CheckpointTokenizer.of_run(config.data, config.model.hf_checkpoint))
    groups = data.get_samples(rollout.num_rollout * rollout.rollout_batch_size)
    job = TRLJob(
        model=str(config.model.hf_checkpoint),
        prompts=[{"prompt": str(group[0].prompt), "label": str(group[0].label)} for group in groups],
        prompts_per_step=rollout.rollout_batch_size,
        group_size=rollout.n_samples_per_prompt,
        min_new_tokens=1,
        max_new_tokens=rollout.rollout_max_response_len,
        reward="last_number",
        trainer={
            "max_steps": rollout.num_rollout,
            "learning_rate": learner.lr,
            "warmup_steps": learner.lr_warmup_steps,
            "lr_scheduler_type": learner.lr_decay_style,
            "adam_beta2": learner.adam_beta2,
            "max_grad_norm": learner.clip_grad,
            "epsilon": clip_range(config.algorithm)[0],
            "epsilon_high": clip_range(config.algorithm)[1],
        },
        goal=GOAL,
    )
    result["TRL"] = run_trl(job).seconds_to_goal()
    return result


def create_model(path: Path, *, small: bool) -> None:
    """Write a model with random weights and the shape of SmolLM2-135M, or a small one, and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from miles_async.adapters.megatron.model.tiny_model import EOS_ID, PAD_ID, byte_tokenizer

    torch.manual_seed(0)
    tiny = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    config = LlamaConfig(
        **(SMOLLM2_SHAPE | (tiny if small else {})),
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)
    # A model with random weights samples all ids of the vocabulary, so those that are no bytes get names here.
    names = {f"<{token}>": token for token in range(PAD_ID + 1, SMOLLM2_SHAPE["vocab_size"])}
    description = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    description["model"]["vocab"] |= {"<eos>": EOS_ID, "<pad>": PAD_ID} | names
    tokenizer = Tokenizer.from_str(json.dumps(description))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(path)


def run_ours(flags: list[str], *, stop_at_goal: bool = False) -> Steps:
    """Run `train_async.py` with the fully asynchronous rollout function."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train_async.py", "--rollout-function-path", Stream.function, *flags]
        output = Path(folder) / "output"
        with output.open("wb") as file:
            run = subprocess.Popen([*command, "--run-dir", f"{folder}/runs"], stdout=file, stderr=file)
        log = Path(folder) / "runs" / "latest" / "events.jsonl"
        try:
            while run.poll() is None:
                time.sleep(1)
                if stop_at_goal and log.exists() and _read(log).seconds_to_goal() is not None:
                    break
            else:
                if run.returncode:
                    raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{output.read_text()[-2000:]}")
        finally:
            run.terminate()
            run.wait()
        return _read(log)


def _read(log: Path) -> Steps:
    events = list(read_events(log))
    began = [event.time for event in events if isinstance(event, ClusterReady)]
    steps = [event for event in events if isinstance(event, StepEnded)]
    return Steps(began[0] if began else 0.0, [step.time for step in steps], [step.reward for step in steps])


def run_trl(job: TRLJob) -> Steps:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        result = folder / "steps.jsonl"
        (folder / "job.json").write_text(json.dumps({**asdict(job), "result": str(result)}))
        # Without PYTHONPATH, which may name packages of another environment.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
        command = [str(TRL_PYTHON), str(TRAINER), str(folder / "job.json")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
        first, *steps = [json.loads(line) for line in result.read_text().splitlines()]
    return Steps(first["time"], [step["time"] for step in steps], [step["reward"] for step in steps])


def trl_version() -> str:
    command = [str(TRL_PYTHON), "-c", "import importlib.metadata as m; print(m.version('trl'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
