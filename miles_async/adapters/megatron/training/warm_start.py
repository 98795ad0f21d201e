"""Warm start: supervised steps before RL, with the same learner, cached per model, settings and data."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.warm_starts import (
    NOTE,
    Example,
    Problems,
    WarmStarted,
    cached_checkpoint,
    find_warm_start,
)
from miles_async.adapters.system.network_ports import free_port
from miles_async.config.schema import Algorithm, RunConfig
from miles_async.errors import UserError

Report = Callable[[int, float, float], None]
"""Receives the step, the loss in nats per token and the greedy accuracy at every check."""

_LR_WARMUP_STEPS = 20
_QUICK_CHECK_SIZE = 64
_ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "lora_rank": 0,  # a warm start trains the base model
}


def warm_start(config: RunConfig, problems: Problems, check: Problems, report: Report) -> WarmStarted:
    """Train the tiny model or `hf_checkpoint` on `problems` and return the checkpoint from which RL starts.

    Training ends as soon as the greedy accuracy on `check` is inside `warm_start_accuracy`. The result is stored in the
    cache, under a hash of everything that determines it. Only one rank trains, independently of the learner's size.
    With `warm_start_max_steps` 0 nothing is trained, and `hf_checkpoint` is returned unchanged.

    Raises UserError if the accuracy skips the range or does not reach it.
    """
    cached = find_warm_start(config, problems, check)
    if cached is not None:
        return cached
    started = time.monotonic()
    path = cached_checkpoint(config, problems, check)
    try:
        steps, accuracy = _create_checkpoint(config, problems, check, path, report)
    except OSError:
        # Another run may have created the same checkpoint at the same time.
        if (cached := find_warm_start(config, problems, check)) is None:
            raise
        return cached
    if not on_cpu():
        # The engines, which may share this device, start next and divide the memory that is free.
        gc.collect()
        torch.cuda.empty_cache()
    return WarmStarted(str(path), False, accuracy, steps, time.monotonic() - started)


def _create_checkpoint(
    config: RunConfig, problems: Problems, check: Problems, path: Path, report: Report
) -> tuple[int, float | None]:
    # A default algorithm has neither a reference model nor a critic, which supervised steps do not need.
    one_rank = config.model_copy(
        update={"learner": config.learner.model_copy(update=_ONE_RANK), "algorithm": Algorithm()}
    )
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = config.model.hf_checkpoint
        if checkpoint is None:
            checkpoint = f"{scratch}/tiny"
            create_tiny_model(config.model.tiny_model, Path(checkpoint), seed=config.learner.seed)
        learner = MegatronLearner(one_rank, checkpoint, 0, 1, "127.0.0.1", free_port())
        try:
            steps, accuracy = _train_to_accuracy(config, learner, checkpoint, problems, check, report)
            learner.save_hf(str(path), {NOTE: json.dumps({"accuracy": accuracy, "steps": steps})})
            return steps, accuracy
        finally:
            learner.close()


def _train_to_accuracy(
    config: RunConfig,
    learner: MegatronLearner,
    checkpoint: str,
    problems: Problems,
    check: Problems,
    report: Report,
) -> tuple[int, float | None]:
    """Train until the accuracy is inside the range; returns the number of steps and the accuracy.

    Without any step the accuracy is None.
    """
    settings = config.warm_start
    low, high = settings.warm_start_accuracy
    tokenizer = CheckpointTokenizer.of_run(config.data, checkpoint)
    end = tokenizer.transformers.eos_token_id
    examples, checks = ([encode_example(tokenizer, example) for example in part] for part in (problems, check))
    generator = random.Random(config.learner.seed)
    check_every, is_far, accuracy = settings.warm_start_check_every, True, None
    for step in range(1, settings.warm_start_max_steps + 1):
        prompts, answers = zip(*generator.sample(examples, settings.warm_start_batch_size), strict=True)
        loss = learner.supervised_step(prompts, answers, settings.warm_start_lr * min(1.0, step / _LR_WARMUP_STEPS))
        # Check more often near the range, so that the accuracy does not skip it.
        if step % (check_every if is_far else max(1, check_every // 2)):
            continue
        # Most checks are far from the range. Only a promising result on a few problems is worth a check on all of them.
        accuracy = _accuracy(learner, checks[:_QUICK_CHECK_SIZE], end)
        if accuracy > low / 2:
            accuracy = _accuracy(learner, checks, end)
        is_far = accuracy < 0.75 * low
        report(step, loss, accuracy)
        if accuracy > high:
            raise UserError(
                f"the warm start's accuracy skipped the range {low} to {high}: it is {accuracy:.3f} at step {step}; "
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


def encode_example(tokenizer: CheckpointTokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, as in generation, and of its answer followed by `eos`."""
    prompt = tokenizer.encode(example.prompt, example.tools)
    answer = tokenizer.encode_text(example.answer, after=tokenizer.text_of(prompt[-1:]))
    return prompt, [*answer, tokenizer.transformers.eos_token_id]


def _accuracy(learner: MegatronLearner, checks: Sequence[tuple[list[int], list[int]]], eos: int) -> float:
    """Fraction of the check problems whose greedy continuation is exactly the answer."""
    longest = max(len(answer) for _, answer in checks)
    outputs = learner.greedy([prompt for prompt, _ in checks], longest, eos)
    return sum(output == answer for output, (_, answer) in zip(outputs, checks, strict=True)) / len(checks)
