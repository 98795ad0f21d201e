"""Measures how long saving a checkpoint interrupts training, and how exactly a resumed run continues.

    python -m benchmarks.checkpoints

Trains a model of ten million parameters on fixed samples, saves it while training continues, and resumes it. Prints the
results and writes benchmarks/results/checkpoints.json. Exits with 1 if the weights of the resumed run differ by more
than 1e-6 from those of the uninterrupted run after ten more rollouts.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.records import record
from miles_async.adapters.megatron.model.tiny_model import create_tiny_model
from miles_async.adapters.megatron.training.learner import MegatronLearner
from miles_async.adapters.system.network_ports import free_port
from miles_async.batching.batch import rank_batches
from miles_async.config.schema import Algorithm, Learner, Rollout, RunConfig, TinyModel
from miles_async.types import Group, Sample

SHAPE = TinyModel(num_layers=6, hidden_size=384, ffn_hidden_size=1024)
BEFORE, AFTER, TARGET = 2, 10, 1e-6
CONFIG = RunConfig(
    algorithm=Algorithm(loss_aggregation="token_mean", off_policy_correction="tis"),
    learner=Learner(lr=1e-3, lr_warmup_steps=4, lr_decay_style="cosine", weight_decay=0.01, adam_beta2=0.98),
    rollout=Rollout(num_rollout=BEFORE + AFTER),
)


def train(learner: MegatronLearner, rollouts: range) -> float:
    """Train and return the median of the seconds per rollout."""
    seconds = []
    for rollout in rollouts:
        draw = random.Random(rollout)
        groups = [
            Group(
                Sample(
                    index=4 * g + i,
                    tokens=[draw.randrange(256) for _ in range(48)],
                    response_length=32,
                    rollout_log_probs=[-5.5 - draw.random() for _ in range(32)],
                    reward=draw.random(),
                )
                for i in range(4)
            )
            for g in range(4)
        ]
        began = time.perf_counter()
        learner.train(rollout, rank_batches(groups, CONFIG, 1)[0])
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> int:
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, folder = f"{scratch}/model", Path(scratch) / "saved"
        create_tiny_model(SHAPE, Path(model), seed=1)
        uninterrupted = MegatronLearner(CONFIG, model, 0, 1, "127.0.0.1", free_port())
        train(uninterrupted, range(BEFORE))
        began = time.perf_counter()
        copy = uninterrupted.copy_state(str(folder))
        found["training_interrupted_seconds"] = time.perf_counter() - began

        def write() -> None:
            found["written_while_training_seconds"] = timed(lambda: copy.finish([copy.write()]))

        writer = threading.Thread(target=write)
        writer.start()
        train(uninterrupted, range(BEFORE, BEFORE + 2))
        writer.join()
        found["rollout_seconds"] = train(uninterrupted, range(BEFORE + 2, BEFORE + AFTER))
        expected = {name: tensor.clone() for name, tensor in uninterrupted.weights()}
        uninterrupted.close()
        found["megabytes"] = sum(file.stat().st_size for file in folder.rglob("*")) / 1e6
        resumed = MegatronLearner(CONFIG, model, 0, 1, "127.0.0.1", free_port())
        found["loaded_seconds"] = timed(lambda: resumed.load_state(str(folder)))
        train(resumed, range(BEFORE, BEFORE + AFTER))
        found["largest_difference"] = max(
            (tensor - expected[name]).abs().max().item() for name, tensor in resumed.weights()
        )
        resumed.close()
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<34}{value:12.4g}")
    record("checkpoints", found)
    return 0 if found["largest_difference"] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
