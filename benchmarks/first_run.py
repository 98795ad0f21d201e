"""Runs the job of `make run` with several seeds: accuracy before and after, and wall time.

    python -m benchmarks.first_run [--seeds N] [--skip N] [--busy | --adapter RATE]

`--busy` keeps one busy loop per core running beside the job. `--adapter` trains an adapter of rank 32 in place of all
weights. Prints a line per run and a table with the spread, and writes benchmarks/results/first_run.json,
first_run_busy.json or first_run_adapter.json. With `--skip`, which is for choosing a learning rate on other seeds,
nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.busy_loops import busy_loops
from benchmarks.records import machine_load, record
from benchmarks.study.runs import run_to_its_end

CONFIG = "configs/smollm2-cpu.yaml"
SEEDS = (42, *range(1, 100))
ADAPTER = ("--lora-rank", "32", "--lora-alpha", "32")
COLUMNS = ("before", "after", "gain", "wall_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="number of runs (default: 10)")
    parser.add_argument("--skip", type=int, default=0, help="number of seeds to leave out first (default: 0)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--busy", action="store_true", help="keep one busy loop per core running")
    kind.add_argument("--adapter", metavar="RATE", help="learning rate of an adapter")
    options = parser.parse_args()
    name = "first_run_busy" if options.busy else "first_run" if options.adapter is None else "first_run_adapter"
    flags = () if options.adapter is None else (*ADAPTER, "--lr", options.adapter)
    runs: list[dict[str, Any]] = []
    with busy_loops() if options.busy else nullcontext():
        for seed in SEEDS[options.skip : options.skip + options.seeds]:
            runs.append(run(seed, *flags))
            print(json.dumps(runs[-1]), flush=True)
            if not options.skip:
                record(name, {"flags": flags, "runs": runs, "spread": spread(runs)})
    for column, found in spread(runs).items():
        print(f"{column:<13} {found}")


def run(seed: int, *flags: str) -> dict[str, Any]:
    """Run the job once. Accuracies are greedy, on the held-out problems; the wall time is that of the whole command."""
    load = machine_load()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train_async.py", "--config", CONFIG, "--run-dir", folder]
        command += ["--seed", str(seed), "--rollout-seed", str(seed), *flags]
        started = time.monotonic()
        run_to_its_end(command)
        seconds = time.monotonic() - started
        summary = json.loads((Path(folder) / "latest" / "summary.json").read_text())
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    return {
        "seed": seed,
        "before": before,
        "after": after,
        "gain": round(after - before, 4),
        "wall_seconds": round(seconds, 1),
        "load": load,
    }


def spread(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation, lowest and highest value of each column."""
    found = {}
    for name in COLUMNS:
        values = [each[name] for each in runs]
        deviation = stdev(values) if len(values) > 1 else 0.0
        numbers = {"mean": fmean(values), "deviation": deviation, "lowest": min(values), "highest": max(values)}
        found[name] = {key: round(value, 3) for key, value in numbers.items()}
    return found


if __name__ == "__main__":
    main()
