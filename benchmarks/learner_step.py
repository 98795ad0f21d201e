"""Measures optimizer steps of the learner on group-based batches: seconds and peak memory.

    python -m benchmarks.learner_step [--before CHECKOUT] [--jobs chat,long,half,half_of_32]

Without a download: a model of random weights with the shape of SmolLM2-135M, in float32 on two threads. The jobs:

    chat   8 groups of 8 samples: a prompt of 44 tokens and responses of 12
    long   a group of 8 samples: a prompt of 512 tokens and responses of 64
    half   the samples of `chat`, of which half of the groups have equal rewards and thus no gradient
    half_of_32
           the same with 32 groups, where the part of a step that does not depend on the batch matters less

Each job runs as the learner runs it and, with `--before`, also in a checkout of an earlier commit, not older than
b283c48f. Each variant is a process, so that its peak memory is its own; the variants take turns, and the medians are
compared. `half` and `half_of_32` are compared with the same batch of which every sample is computed. Writes
benchmarks/results/learner-step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

THREADS = 2
JOBS = {"chat": (8, 44, 12), "long": (1, 512, 64), "half": (8, 44, 12), "half_of_32": (32, 44, 12)}
"""Groups, tokens of a prompt, and tokens of a response. A group has eight samples."""
HALVES = ("half", "half_of_32")
"""Jobs in which every other group has equal rewards."""
GROUP_SIZE = 8
SMOLLM2_SHAPE: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Settings of a `LlamaConfig` with the shape of SmolLM2-135M."""
TRAINING = {"lr_decay_style": "constant", "weight_decay": 0.0, "adam_beta2": 0.98}
LOSS = {"loss_aggregation": "token_mean", "off_policy_correction": "tis"}
"""Settings of the sections `learner` and `algorithm`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--jobs", default=",".join(JOBS), help="default: all")
    parser.add_argument("--repeats", type=int, default=3, help="processes per variant (default: 3)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    from benchmarks.records import record, recorded

    results = recorded("learner-step")
    with tempfile.TemporaryDirectory() as scratch:
        create_model(Path(scratch) / "model")
        for job in options.jobs.split(","):
            variants = ["now", "all"] if job in HALVES else ["now"]
            checkouts = {variant: Path.cwd() for variant in variants}
            if options.before is not None and job not in HALVES:
                checkouts["before"] = options.before
            results[job] = measure(job, checkouts, f"{scratch}/model", options.repeats)
            print(job, json.dumps(results[job]), flush=True)
    record("learner-step", results)


def measure(job: str, checkouts: dict[str, Path], model: str, repeats: int) -> dict[str, Any]:
    """Run the variants in turns; returns the median seconds and the peak memory in GiB of each."""
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in checkouts}
    for _ in range(repeats):
        for variant, checkout in checkouts.items():
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", job, variant, model]
            environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(THREADS)}
            done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True)
            runs[variant].append(json.loads(done.stdout.splitlines()[-1]))
    found: dict[str, Any] = {
        variant: {key: round(median(run[key] for run in of_variant), 3) for key in of_variant[0]}
        for variant, of_variant in runs.items()
    }
    for slower in found.keys() - {"now"}:
        found[f"speedup_over_{slower}"] = round(found[slower]["seconds"] / found["now"]["seconds"], 2)
    return found


def create_model(path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SMOLLM2_SHAPE, dtype="float32")
    LlamaForCausalLM(config).save_pretrained(path)


def work(job: str, variant: str, model: str) -> None:
    """Take two steps, and print the seconds of the second one and the peak memory of the process."""
    import torch

    from miles_async import cpu_compat
    from miles_async.config.schema import RunConfig  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(THREADS)
    groups = groups_of(job)
    config = RunConfig.model_validate({"algorithm": LOSS, "learner": TRAINING})
    # This process runs a script, and therefore not `benchmarks/__init__.py`.
    cpu_compat.install()
    from miles_async.adapters.megatron.training.learner import MegatronLearner
    from miles_async.batching.batch import policy_steps

    [steps] = policy_steps(groups, config, ranks=1, share_prefixes=True, computes_all=variant == "all")
    learner = MegatronLearner(config, model, 0, 1, "127.0.0.1", free_port())
    learner.train(0, steps)
    started = time.perf_counter()
    learner.train(1, steps)
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    learner.close()
    print(json.dumps({"seconds": seconds, "memory_gib": memory}))


def groups_of(job: str) -> list[Any]:
    """The groups of a job."""
    from miles_async.types import Group, Sample

    group_count, prompt_tokens, response_tokens = JOBS[job]
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(SMOLLM2_SHAPE["vocab_size"]) for _ in range(count)]

    groups = []
    for number in range(group_count):
        prompt = tokens(prompt_tokens)
        equal = job in HALVES and number % 2 == 0
        groups.append(
            Group(
                Sample(
                    index=GROUP_SIZE * number + i,
                    tokens=prompt + tokens(response_tokens),
                    response_length=response_tokens,
                    rollout_log_probs=[-10.8] * response_tokens,
                    reward=0.0 if equal else float(i % 2),
                )
                for i in range(GROUP_SIZE)
            )
        )
    return groups


def free_port() -> int:
    """Return a free port. The project's own function is in another module in earlier commits."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
