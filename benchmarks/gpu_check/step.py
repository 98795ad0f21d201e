"""Optimizer steps in bfloat16: the shape of Qwen3-0.6B on sequences of 8k tokens and on one of 32k, and experts.

With Megatron's local layers, and with Transformer Engine's.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.learner import furthest, token_lists
from benchmarks.gpu_check.measure import report_cost, report_kernels
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import ON_GPU, QWEN3, QWEN3_ON_CPU, Surroundings, require_transformer_engine
from benchmarks.settings import TRAINING
from miles_async.adapters.megatron.model.environment import DETERMINISTIC, environment
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.batching.batch import TrainStep, rank_batches
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.stack.learning import learning

VOCABULARY: int = (QWEN3 if ON_GPU else QWEN3_ON_CPU)["vocab_size"]
SHORT, LONG = ((8192,) * 4, (32_512, 256)) if ON_GPU else ((128,) * 4, (448, 64))
"""Tokens of each sequence of a step. The short ones are a micro-batch each. The long one shares its micro-batch with
another, because a group of one sample has no advantage."""
MICRO_BATCH = {SHORT: SHORT[0], LONG: sum(LONG)}
"""Most tokens of a micro-batch."""
PROMPT = 32
"""Tokens of the prompt."""
LOCAL: dict[str, Any] = {"transformer_impl": "local"}
TRANSFORMER_ENGINE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def check(report: Report, surroundings: Surroundings) -> None:
    """Report speed, memory and kernels of steps, with and without recomputed activations and with experts."""
    dense, experts = surroundings.qwen3(), surroundings.experts()
    short = {"short sequences": SHORT}
    both = short | {"long sequence": LONG}
    for suffix, checkpoint, sizes, settings in (
        ("", dense, both, LOCAL),
        (", recomputed", dense, {"long sequence": LONG}, LOCAL | RECOMPUTED),
        (", Transformer Engine", dense, both, TRANSFORMER_ENGINE),
        (", experts", experts, short, LOCAL),
        (", experts, Transformer Engine", experts, short, TRANSFORMER_ENGINE),
    ):
        with report.part(f"learner{suffix}"):
            if settings == TRANSFORMER_ENGINE:
                require_transformer_engine()
            with learning(checkpoint, learner_config(**settings)) as learner:
                for name, lengths in sizes.items():
                    with report.part(f"{name}{suffix}"):
                        measure(report, f"{name}{suffix}", learner, lengths)
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


def measure(report: Report, part: str, learner: MegatronLearner, lengths: tuple[int, ...]) -> None:
    steps = train_steps(lengths)

    def train() -> None:
        if not learner.train(0, steps).finite:
            raise RuntimeError("a loss or gradient is not finite")

    seconds = report_cost(report, part, train)
    report.figure(f"{part}: speed", sum(lengths) / seconds, "tokens/s")
    report_kernels(report, part, train)


def check_deterministic(report: Report, surroundings: Surroundings) -> None:
    """Take the same steps twice with `--deterministic-mode`. CUDA's libraries must not have been used before."""
    with environment(DETERMINISTIC):
        for name, checkpoint in (("dense", surroundings.qwen3()), ("experts", surroundings.experts())):
            with report.part(name):
                first, second = (logprobs_after_steps(checkpoint) for _ in range(2))
                report.figure(f"{name}: two runs differ by", furthest(first, second), "nats", at_most=0.0)


def logprobs_after_steps(checkpoint: Path) -> list[list[float]]:
    steps = train_steps(SHORT)
    with learning(checkpoint, learner_config(deterministic_mode=True)) as learner:
        for rollout in range(2):
            if not learner.train(rollout, steps).finite:
                raise RuntimeError("a loss or gradient is not finite")
        return learner.logprobs(token_lists(SHORT))


def learner_config(**settings: Any) -> Any:
    return run_config(**TRAINING, precision="bf16", lr=1e-6, share_prefixes=False, **settings)


def train_steps(lengths: tuple[int, ...]) -> list[TrainStep]:
    """One step on samples with one prompt, of which every other one has a reward."""
    draw = random.Random(0)
    prompt = [draw.randrange(VOCABULARY) for _ in range(PROMPT)]
    group = Group(
        Sample(
            index=i,
            tokens=prompt + [draw.randrange(VOCABULARY) for _ in range(length - PROMPT)],
            response_length=length - PROMPT,
            rollout_log_probs=[-12.0] * (length - PROMPT),
            reward=float(i % 2),
        )
        for i, length in enumerate(lengths)
    )
    [steps] = rank_batches([group], learner_config(max_tokens_per_gpu=MICRO_BATCH[lengths]), 1)
    return steps
