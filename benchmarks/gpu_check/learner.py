"""The learner in bfloat16, with Megatron's local layers and with Transformer Engine's, against float32."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.engine import transformers_logprobs, transformers_model
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import SMALL, Surroundings, require_transformer_engine
from benchmarks.settings import TRAINING
from miles_async.batching.batch import rank_batches
from tests.configuration import run_config
from tests.stack.learning import learning, prompted_groups

LENGTHS = (5, 17, 40, 300, 9, 130, 1024)
"""Tokens of the sequences whose log-probabilities are compared. They are packed into one micro-batch."""
LOGPROB_LIMIT = {"fp32": 1e-4, "bf16": 3e-2}
"""In nats. bfloat16 has 8 bits, and rounds after every layer."""
GRADIENT_LIMIT = 0.03
"""Relative difference of the gradient norm."""


@dataclass(frozen=True, slots=True)
class Computed:
    logprobs: list[list[float]]
    grad_norm: float
    seconds: float
    """Of the second optimizer step on the same batch."""


def check(report: Report, surroundings: Surroundings) -> None:
    compare(report, surroundings.checkpoint(SMALL))


def compare(report: Report, checkpoint: Path, lengths: Sequence[int] = LENGTHS) -> None:
    sequences = token_lists(lengths)
    with report.part("float32"):
        exact = computed(checkpoint, sequences, precision="fp32", transformer_impl="local")
        apart = furthest(exact.logprobs, transformers_logprobs(transformers_model(checkpoint, "fp32"), sequences))
        report.figure("float32 against transformers", apart, "nats", at_most=LOGPROB_LIMIT["fp32"])
        for name, implementation in (("local layers", "local"), ("Transformer Engine", "transformer_engine")):
            with report.part(f"bf16, {name}"):
                if implementation == "transformer_engine":
                    require_transformer_engine()
                mixed = computed(checkpoint, sequences, precision="bf16", transformer_impl=implementation)
                apart = furthest(mixed.logprobs, exact.logprobs)
                report.figure(f"bf16, {name}: log-probabilities", apart, "nats", at_most=LOGPROB_LIMIT["bf16"])
                relative = abs(mixed.grad_norm / exact.grad_norm - 1)
                report.figure(f"bf16, {name}: gradient norm", relative, "relative", at_most=GRADIENT_LIMIT)
                report.figure(f"bf16, {name}: optimizer step", 1e3 * mixed.seconds, "ms")


def computed(checkpoint: Path, sequences: list[list[int]], **settings: Any) -> Computed:
    """Compute log-probabilities, and train one batch twice. Common prefixes are not shared, as by default on GPUs."""
    run = run_config(**TRAINING, **settings, lr=1e-5, share_prefixes=False)
    with learning(checkpoint, run) as learner:
        logprobs = learner.logprobs(sequences)
        [steps] = rank_batches(prompted_groups(0), run, 1)
        first = learner.train(0, steps)
        if not first.finite:
            raise RuntimeError("a loss or gradient is not finite")
        began = time.perf_counter()
        learner.train(1, steps)
        seconds = time.perf_counter() - began
    gc.collect()
    return Computed(logprobs, first.metrics["grad_norm"], seconds)


def token_lists(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((torch.tensor(one) - torch.tensor(other)).abs().max().item() for one, other in pairs)
