"""Compares an optimizer step of LoRA with one of full training on the same batch: seconds, and bytes of the state.

    python -m benchmarks.lora_step [--rank 32] [--repeats 5]

The model and the batches are those of `benchmarks.learner_step`: the shape of SmolLM2-135M with random weights, in
float32 on two threads. Both learners take their steps in turns, each in its own process, and medians are compared. The
state is what a learner keeps between steps: weights, gradients and moments. Writes benchmarks/results/lora-step.json.
Exits with 1 if LoRA needs more than 85 % of the seconds or 35 % of the bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.learner_step import JOBS, LOSS, THREADS, TRAINING, create_model, groups_of
from benchmarks.records import record

MOST_SECONDS, MOST_BYTES = 0.85, 0.35
REST_SECONDS = 0.5
"""Pause before each step, because the threads of the other learner keep spinning for a while after its step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    processes, found = get_context("spawn"), dict[str, Any]()
    with tempfile.TemporaryDirectory() as scratch:
        create_model(Path(scratch) / "model")
        ends: dict[str, Connection] = {}
        for name, rank in (("lora", options.rank), ("full", 0)):
            ends[name], theirs = processes.Pipe()
            processes.Process(target=learn, args=(f"{scratch}/model", rank, theirs), daemon=True).start()
            theirs.close()  # so that `recv` raises EOFError if the process has ended
        state = {name: end.recv() for name, end in ends.items()}
        for job in ("chat", "long"):
            seconds: dict[str, list[float]] = {name: [] for name in ends}
            for _ in range(1 + options.repeats):
                for name, end in ends.items():
                    time.sleep(REST_SECONDS)
                    end.send(job)
                    seconds[name].append(end.recv())
            # The first step creates the state of the optimizer.
            medians = {name: median(of_learner[1:]) for name, of_learner in seconds.items()}
            found[job] = medians | {"ratio": medians["lora"] / medians["full"]}
    found["state_bytes"] = state | {"ratio": state["lora"] / state["full"]}
    for name, values in found.items():
        print(f"{name:<12}", "  ".join(f"{key} {value:,.3f}" for key, value in values.items()))
    record("lora-step", found)
    is_slow = max(found[job]["ratio"] for job in ("chat", "long")) > MOST_SECONDS
    return int(is_slow or found["state_bytes"]["ratio"] > MOST_BYTES)


def learn(model: str, rank: int, pipe: Connection) -> None:
    """Send the bytes of the state after a step, and then the seconds of a step on each job that is asked for."""
    import torch

    torch.set_num_threads(THREADS)
    from miles_async.adapters.megatron.training.learner import MegatronLearner
    from miles_async.adapters.megatron.training.optimizer import distinct_storages, model_tensors
    from miles_async.adapters.system.network_ports import free_port
    from miles_async.batching.batch import policy_steps
    from miles_async.config.schema import RunConfig

    config = RunConfig.model_validate({"algorithm": LOSS, "learner": {**TRAINING, "lora_rank": rank}})
    learner = MegatronLearner(config, model, 0, 1, "127.0.0.1", free_port())
    batches = {job: policy_steps(groups_of(job), config, ranks=1, share_prefixes=True)[0] for job in JOBS}
    learner.train(0, batches["chat"])
    trained = learner._model
    gradients = [buffer.grad_data for chunk in trained.chunks for buffer in chunk.buffers]
    storages = distinct_storages([*model_tensors(trained), *gradients])
    pipe.send(sum(storage.nbytes() for storage in storages.values()))
    with suppress(EOFError):  # all steps were measured
        while True:
            steps = batches[pipe.recv()]
            started = time.perf_counter()
            learner.train(1, steps)
            pipe.send(time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
