"""Supervised steps before RL, through the same learner, once per model and data."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.storage.warm_starts import NOTE, Problems, WarmStarted, cached_checkpoint, find_warm_start
from miles_async.adapters.system.network_ports import free_port
from miles_async.config.schema import Algorithm, RunConfig
from miles_async.errors import UserError

Report = Callable[[int, float, float], None]
"""Step, loss in nats per token, greedy accuracy."""

_LR_WARMUP_STEPS = 20
_GLANCE = 64
_ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
}


def warm_start(config: RunConfig, problems: Problems, check: Problems, report: Report) -> WarmStarted:
    """The checkpoint that RL starts from: the tiny model or `hf_checkpoint`, after supervised steps on `problems`.

    Ends at the first greedy accuracy on `check` inside `warm_start_accuracy`. The result lies in the cache under the
    hash of everything that made it. Runs as one rank, whatever the learner's size. `report` hears of every look.
    With `warm_start_max_steps` 0 nothing is trained, and a given checkpoint is returned as it is.

    Raises UserError when the accuracy jumps over the range or does not reach it.
    """
    made_before = find_warm_start(config, problems, check)
    if made_before is not None:
        return made_before
    started = time.monotonic()
    place = cached_checkpoint(config, problems, check)
    steps, accuracy = _make(config, problems, check, place, report)
    return WarmStarted(str(place), False, accuracy, steps, time.monotonic() - started)


def _make(
    config: RunConfig, problems: Problems, check: Problems, place: Path, report: Report
) -> tuple[int, float | None]:
    # Lessons need neither a reference model nor a critic.
    alone = config.model_copy(update={"learner": config.learner.model_copy(update=_ONE_RANK), "algorithm": Algorithm()})
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = config.model.hf_checkpoint
        if checkpoint is None:
            checkpoint = f"{scratch}/tiny"
            create_tiny_model(config.model.tiny_model, Path(checkpoint), seed=config.learner.seed)
        learner = MegatronLearner(alone, checkpoint, 0, 1, "127.0.0.1", free_port())
        try:
            steps, accuracy = _teach(config, learner, checkpoint, problems, check, report)
            learner.save_hf(str(place), {NOTE: json.dumps({"accuracy": accuracy, "steps": steps})})
            return steps, accuracy
        finally:
            learner.close()


def _teach(
    config: RunConfig,
    learner: MegatronLearner,
    checkpoint: str,
    problems: Problems,
    check: Problems,
    report: Report,
) -> tuple[int, float | None]:
    """Supervised steps until the accuracy is inside the range; the steps taken and the accuracy."""
    settings = config.warm_start
    low, high = settings.warm_start_accuracy
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sft_examples, checks = ([_encoded(tokenizer, pair) for pair in pairs] for pairs in (problems, check))
    draw = random.Random(config.learner.seed)
    every, far, accuracy = settings.warm_start_check_every, True, None
    for step in range(1, settings.warm_start_max_steps + 1):
        prompts, answers = zip(*draw.sample(sft_examples, settings.warm_start_batch_size), strict=True)
        loss = learner.supervised_step(prompts, answers, settings.warm_start_lr * min(1.0, step / _LR_WARMUP_STEPS))
        if step % (every if far else max(1, every // 2)):
            continue
        # Most looks are far from the range: a glance at some of the problems saves most of their time.
        accuracy = _accuracy(learner, checks[:_GLANCE], tokenizer.eos_token_id)
        if accuracy > low / 2:
            accuracy = _accuracy(learner, checks, tokenizer.eos_token_id)
        far = accuracy < 0.75 * low
        report(step, loss, accuracy)
        if accuracy > high:
            raise UserError(
                f"the warm start jumped over {low} to {high} to {accuracy:.3f} at step {step}: "
                "lower warm_start_check_every or warm_start_lr, or widen warm_start_accuracy"
            )
        if accuracy >= low:
            return step, accuracy
    if settings.warm_start_max_steps:
        raise UserError(
            f"the warm start's greedy accuracy stayed below {low} for {settings.warm_start_max_steps} steps "
            f"(last: {accuracy}): raise warm_start_max_steps or warm_start_lr"
        )
    return 0, None


def _encoded(tokenizer: Any, pair: tuple[str, str]) -> tuple[list[int], list[int]]:
    prompt, answer = pair
    return tokenizer.encode(prompt), [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def _accuracy(learner: MegatronLearner, checks: Sequence[tuple[list[int], list[int]]], eos: int) -> float:
    """Share of the check problems whose greedy continuation is the answer, token by token."""
    longest = max(len(answer) for _, answer in checks)
    outputs = learner.greedy([prompt for prompt, _ in checks], longest, eos)
    return sum(output == answer for output, (_, answer) in zip(outputs, checks, strict=True)) / len(checks)
