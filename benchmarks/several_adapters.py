"""Three adapters in one run against one run for each: accuracy of each task, and batches per second.

    python -m benchmarks.several_adapters [numbers] [tools] [--seeds N]

    numbers  SmolLM2-135M-Instruct (configs/smollm2-cpu.yaml) adds, finds the larger number, and counts on
    tools    the agent whose tools wait (configs/slow-tools-cpu.yaml) adds, subtracts, and does both; the runs of a seed
             begin with the same warm start

A run of three adapters trains three times as many batches as a run of one, so that each task sees the same number of
samples. Time begins when the evaluation before training ends, and ends with the last optimizer step. `busy` is the
share of the processors' time that all programs use from the start of a run to its end. Accuracy is greedy, on held-out
problems of the task. Prints a line per run and per job, and writes benchmarks/results/several-adapters.json after each
seed. A seed that the file has with these settings is not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.records import machine_load, record, recorded
from benchmarks.study.page import Interval
from benchmarks.study.runs import FULLY_ASYNC, SEEDS, run_to_its_end
from miles_async.adapters.storage.warm_starts import NOTE
from miles_async.events import Evaluated, StepEnded
from miles_async.observability.trace.event_log import read_events

NAME = "several-adapters"
ADAPTER = ("--lora-rank", "32", "--lora-alpha", "32", "--rollout-function-path", FULLY_ASYNC)
BATCHES = 20
"""Batches of each task."""
PROBLEMS = 600
CALLS = Path("examples/calls.jsonl")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Job:
    """A configuration, and what its runs need beside their data sets."""

    config: Path
    flags: tuple[str, ...]
    needs_base: bool
    """Whether a warm start makes the base model."""


JOBS = {
    "numbers": Job(
        Path("configs/smollm2-cpu.yaml"),
        ("--reasoning-gym-task", "null", "--input-key", "question", "--label-key", "answer", "--lr", "2e-4"),
        False,
    ),
    "tools": Job(
        Path("configs/slow-tools-cpu.yaml"),
        ("--prompt-data", "null", "--warm-start-max-steps", "0", "--eval-size", "96", "--lr", "2e-3"),
        True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", choices=[*JOBS, []], metavar="job", help=", ".join(JOBS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each job (default: 3)")
    options = parser.parse_args()
    results = recorded(NAME)
    for name in options.jobs or JOBS:
        seeds = results.setdefault(name, {})
        for seed in SEEDS[: options.seeds]:
            settings = [JOBS[name].config.read_text(), *JOBS[name].flags, *ADAPTER, BATCHES]
            if seeds.get(str(seed), {}).get("settings") != settings:
                seeds[str(seed)] = {"settings": settings, **measured(JOBS[name], rows_of(name), seed)}
                record(NAME, results)
        print(json.dumps({"job": name, **compared(list(seeds.values()))}), flush=True)


def rows_of(job: str) -> Rows:
    """The rows of each task."""
    if job == "tools":
        calls = [json.loads(line) for line in CALLS.read_text().splitlines()]
        signs = {sign: [call for call in calls if f" {sign} " in call["prompt"]] for sign in "+-"}
        return {"sums": signs["+"], "differences": signs["-"], "both": calls}
    draw = random.Random(0)
    rows: dict[str, list[dict[str, str]]] = {"sums": [], "larger": [], "successors": []}
    for _ in range(PROBLEMS):
        first, second = draw.randint(1, 99), draw.randint(1, 99)
        rows["sums"].append(_row(f"What is {first} + {second}?", first + second))
        rows["larger"].append(_row(f"Which number is larger, {first} or {second}?", max(first, second)))
        rows["successors"].append(_row(f"Which number comes after {first + second}?", first + second + 1))
    return rows


def _row(question: str, answer: int) -> dict[str, str]:
    return {"question": f"{question} Answer with the number only.", "answer": str(answer)}


def measured(job: Job, rows: Rows, seed: int) -> dict[str, Any]:
    """One run with an adapter for each task, and one run for each task alone: seconds and accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        for task, lines in rows.items():
            (Path(folder) / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        base = ("--hf-checkpoint", str(_base(job, Path(folder)))) if job.needs_base else ()
        together = _run(job, Path(folder), list(rows), seed, base)
        alone = {task: _run(job, Path(folder), [task], seed, base) for task in rows}
    return {"together": together, "alone": alone}


def compared(seeds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How many times as fast the run of all adapters was, and how its accuracy differed for each task."""
    ratios = [sum(run["seconds"] for run in each["alone"].values()) / each["together"]["seconds"] for each in seeds]
    ratio = Interval.of(ratios)
    differences = {
        task: [each["together"]["after"][task] - each["alone"][task]["after"][task] for each in seeds]
        for task in seeds[0]["alone"]
    }
    return {"times as fast": ratio.shown(f"{ratio.mean:.2f}")} | {
        f"accuracy of {task}": str(Interval.of(values)) for task, values in differences.items()
    }


def _base(job: Job, folder: Path) -> Path:
    """The model that the job's warm start makes."""
    cache = folder / "base"
    flags = ("--config", str(job.config), "--num-rollout", "1", "--cache-dir", str(cache), "--run-dir", str(folder))
    run_to_its_end([sys.executable, "train.py", *flags])
    (note,) = cache.rglob(NOTE)
    return note.parent


def _run(job: Job, folder: Path, tasks: Sequence[str], seed: int, base: Sequence[str]) -> dict[str, Any]:
    load = machine_load()
    psutil.cpu_percent()  # the first call of a process begins the measurement
    datasets = {task: {"prompt_data": str(folder / f"{task}.jsonl")} for task in tasks}
    several: tuple[str, ...] = ()
    if len(tasks) > 1:
        datasets = {task: {**dataset, "adapter": task} for task, dataset in datasets.items()}
        several = ("--adapters", json.dumps({task: {} for task in tasks}))
    runs = folder / f"{'-'.join(tasks)}-{seed}"
    flags = (
        *("--config", str(job.config), *job.flags, *ADAPTER, *base, "--datasets", json.dumps(datasets), *several),
        *("--num-rollout", str(BATCHES * len(tasks)), "--seed", str(seed), "--rollout-seed", str(seed)),
        *("--run-dir", str(runs)),
    )
    run_to_its_end([sys.executable, "train_async.py", *flags])
    events = list(read_events(runs / "latest" / "events.jsonl"))
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    steps = [event.time for event in events if isinstance(event, StepEnded)]
    begun = max(event.time for event in evaluations if event.rollout < 0)
    run = {
        "seconds": round(max(steps) - begun, 2),
        "load": load,
        "busy": round(psutil.cpu_percent() / 100, 3),
        "before": {event.name: event.accuracy for event in evaluations if event.rollout < 0},
        "after": {event.name: event.accuracy for event in evaluations},
    }
    print(json.dumps({"seed": seed, **run}), flush=True)
    return run


if __name__ == "__main__":
    main()
