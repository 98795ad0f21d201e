"""Measures the speed-up from packing when the tiny model trains on a batch with long-tailed lengths.

    python -m benchmarks.packed_training

Trains the same samples alternately packed without padding, padded to the longest sample, and alone
(`--no-use-dynamic-batch-size`: each micro-batch holds one sample), in one thread. Prints tokens per second of CPU time,
which other programs hardly change, and writes benchmarks/results/packed-training.json. Exits with 1 if the speed-up
over padding is below 0.9 of the ratio of padded to valid tokens, which is the ideal speed-up.
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

SAMPLES, LONGEST, CAP, REPEATS = 48, 512, 4096, 3
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
    began = time.process_time()
    learner.train(0, [step])
    return time.process_time() - began


def main() -> int:
    torch.set_num_threads(1)
    config = RunConfig(
        algorithm=Algorithm(loss_aggregation="token_mean", off_policy_correction="tis"),
        learner=Learner(max_tokens_per_gpu=CAP, lr_decay_style="constant", weight_decay=0.0, adam_beta2=0.98),
    )
    scored = samples()
    packed, padded = step_of(scored, config.learner, None), step_of(scored, config.learner, LONGEST)
    alone = step_of(scored, config.learner.model_copy(update={"use_dynamic_batch_size": False}), None)
    valid = sum(len(one.sample.tokens) for one in scored)
    with tempfile.TemporaryDirectory() as scratch:
        create_tiny_model(TinyModel(), Path(scratch) / "tiny", seed=1)
        learner = MegatronLearner(config, f"{scratch}/tiny", 0, 1, "127.0.0.1", free_port())
        seconds(learner, packed)
        timed = [tuple(seconds(learner, step) for step in (packed, padded, alone)) for _ in range(REPEATS)]
        learner.close()
    of_packed, of_padded, of_alone = zip(*timed, strict=True)
    speedup = median(slow / fast for fast, slow in zip(of_packed, of_padded, strict=True))
    ratio = SAMPLES * LONGEST / valid
    found = {
        "tokens_per_second_packed": valid / median(of_packed),
        "tokens_per_second_padded": valid / median(of_padded),
        "tokens_per_second_alone": valid / median(of_alone),
        "speedup": speedup,
        "speedup_over_alone": median(slow / fast for fast, slow in zip(of_packed, of_alone, strict=True)),
        "padded_over_valid": ratio,
        "fraction_of_ideal": speedup / ratio,
    }
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<28}{value:10.2f}")
    record("packed-training", found)
    return 0 if found["fraction_of_ideal"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
