"""Measures the speed-up from packing when the tiny model trains on a batch with long-tailed lengths.

    python -m benchmarks.packed_training

Trains the same samples alternately packed without padding and padded to the longest sample. Prints tokens per second
and writes benchmarks/results/packed-training.json. Exits with 1 if the speed-up is below 0.9 of the ratio of padded to
valid tokens, which is the ideal speed-up.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.records import record
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.advantages import ScoredSample
from miles_async.batching.batch import TrainStep, pack_samples, trained_columns
from miles_async.batching.layout import Padding, training_layout
from miles_async.config.schema import Algorithm, Learner, RunConfig, TinyModel
from miles_async.types import Sample

SAMPLES, LONGEST, CAP, REPEATS = 48, 512, 4096, 5
TARGET = 0.9


def samples() -> list[ScoredSample]:
    draw = random.Random(0)
    lengths = [max(8, min(LONGEST, int(draw.lognormvariate(4.6, 0.8)))) for _ in range(SAMPLES - 1)] + [LONGEST]
    return [
        ScoredSample(
            Sample(
                tokens=[draw.randrange(256) for _ in range(length)],
                response_length=length // 2,
                rollout_log_probs=[-5.5] * (length // 2),
            ),
            group=number,
            trajectory=number,
            advantage=draw.gauss(0, 1),
        )
        for number, length in enumerate(lengths)
    ]


def step_of(scored: list[ScoredSample], learner: Learner, width: int | None) -> TrainStep:
    """Return one optimizer step with all samples, padded to `width` tokens if it is given."""
    layout = training_layout([width or len(one.sample.tokens) for one in scored], learner, 1)
    columns = trained_columns(one.sample for one in scored)
    batches = [pack_samples([scored[i] for i in bin_], columns, Padding(width)) for bin_ in layout.bins[0]]
    return TrainStep(batches, sum(len(batch.targets) for batch in batches))


def seconds(learner: MegatronLearner, step: TrainStep) -> float:
    began = time.perf_counter()
    learner.train(0, [step])
    return time.perf_counter() - began


def main() -> int:
    torch.set_num_threads(1)
    config = RunConfig(
        algorithm=Algorithm(loss_aggregation="token_mean", off_policy_correction="tis"),
        learner=Learner(max_tokens_per_gpu=CAP, lr_decay_style="constant", weight_decay=0.0, adam_beta2=0.98),
    )
    scored = samples()
    packed, padded = step_of(scored, config.learner, None), step_of(scored, config.learner, LONGEST)
    valid = sum(len(one.sample.tokens) for one in scored)
    with tempfile.TemporaryDirectory() as scratch:
        create_tiny_model(TinyModel(), Path(scratch) / "tiny", seed=1)
        learner = MegatronLearner(config, f"{scratch}/tiny", 0, 1, "127.0.0.1", free_port())
        seconds(learner, packed)
        timed = [(seconds(learner, packed), seconds(learner, padded)) for _ in range(REPEATS)]
        learner.close()
    speedup = median(slow / fast for fast, slow in timed)
    ratio = SAMPLES * LONGEST / valid
    found = {
        "tokens_per_second_packed": valid / median(fast for fast, _ in timed),
        "tokens_per_second_padded": valid / median(slow for _, slow in timed),
        "speedup": speedup,
        "padded_over_valid": ratio,
        "fraction_of_ideal": speedup / ratio,
    }
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<28}{value:10.2f}")
    record("packed-training", found)
    return 0 if found["fraction_of_ideal"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
