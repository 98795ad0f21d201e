"""Measures how far generation and training overlap in an asynchronous run, compared with a synchronous run.

    python -m benchmarks.overlap [--rollouts 40] [--set --rollout-batch-size=32 …]

Engine and learner run on one core each. `R` and `T` are the seconds for generation and for training of all batches in
the synchronous run. The asynchronous run takes at least the larger of the two, so `max(R, T) / wall` is the fraction of
the ideal throughput that it reaches. Prints a table and writes benchmarks/results/overlap.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.records import record
from miles_async.events import BatchDrained, RunEnded, StepEnded, StepStarted
from miles_async.observability.trace.event_log import read_events

CONFIG = "configs/arithmetic-cpu.yaml"
FULLY_ASYNC = "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
PINNED = ["--engine-cpus", "[0]", "--learner-cpus", "[1]", "--learner-threads", "1"]
VARIANTS = {
    "synchronous, pinned": ("train.py", PINNED),
    "synchronous": ("train.py", ["--learner-threads", "2"]),
    "fully async, pinned": ("train_async.py", PINNED),
}


def run(entry: str, flags: list[str], rollouts: int) -> dict[str, float]:
    """Return seconds of waiting for rollout, of training and in all, without the first batch, which is a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, entry, "--config", CONFIG, "--rollout-function-path", FULLY_ASYNC, *flags]
        command += ["--num-rollout", str(rollouts), "--eval-size", "0", "--run-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        events = list(read_events(Path(folder) / "latest" / "events.jsonl"))
    [ended] = [event for event in events if isinstance(event, RunEnded)]
    if ended.reason != "done":
        raise SystemExit(f"{entry} ended: {ended.reason}")
    waits = {event.rollout: event.waited for event in events if isinstance(event, BatchDrained)}
    steps = [event for event in events if isinstance(event, StepEnded)]
    groups = sum(len(event.groups) for event in events if isinstance(event, StepStarted) and event.rollout > 0)
    wall = steps[-1].time - steps[0].time
    return {
        "waiting for rollout": sum(wait for rollout, wait in waits.items() if rollout > 0),
        "training": sum(step.seconds for step in steps[1:]),
        "wall": wall,
        "groups per second": groups / wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=40, help="batches per run (default: 40)")
    parser.add_argument("--set", nargs="*", default=[], help="further flags for all runs, in the form --flag=value")
    arguments = parser.parse_args()
    shared = [word for flag in arguments.set for word in flag.split("=", 1)]
    figures = {name: run(entry, flags + shared, arguments.rollouts) for name, (entry, flags) in VARIANTS.items()}
    synchronous, overlapped = figures["synchronous, pinned"], figures["fully async, pinned"]
    rollout, training = synchronous["waiting for rollout"], synchronous["training"]
    results = {
        "rollouts": arguments.rollouts,
        "runs": figures,
        "R": rollout,
        "T": training,
        "R / T": rollout / training,
        "max(R, T) / wall": max(rollout, training) / overlapped["wall"],
        "speed-up over synchronous": synchronous["wall"] / overlapped["wall"],
    }
    print(f"{'':22}{'rollout s':>12}{'training s':>12}{'wall s':>12}{'groups/s':>12}")
    for name, row in figures.items():
        print(f"{name:22}" + "".join(f"{value:12.2f}" for value in row.values()))
    print(f"R / T {results['R / T']:.2f}, max(R, T) / wall {results['max(R, T) / wall']:.2f}")
    record("overlap", results)


if __name__ == "__main__":
    main()
