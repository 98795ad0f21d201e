"""Runs the job of `make run` with several seeds: accuracy before and after, and wall time.

    python -m benchmarks.first_run [--seeds N] [--busy]

`--busy` keeps one busy loop per core running beside the job. Prints a line per run and a table with the spread, and
writes benchmarks/results/first_run.json, or first_run_busy.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.busy_loops import busy_loops
from benchmarks.records import machine_load, record

CONFIG = "configs/smollm2-cpu.yaml"
SEEDS = (42, *range(1, 100))
COLUMNS = ("before", "after", "gain", "wall_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="number of runs (default: 10)")
    parser.add_argument("--busy", action="store_true", help="keep one busy loop per core running")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with busy_loops() if options.busy else nullcontext():
        for seed in SEEDS[: options.seeds]:
            runs.append(run(seed))
            print(json.dumps(runs[-1]), flush=True)
            record("first_run_busy" if options.busy else "first_run", {"runs": runs, "spread": spread(runs)})
    for name, found in spread(runs).items():
        print(f"{name:<13} {found}")


def run(seed: int) -> dict[str, Any]:
    """Run the job once. Accuracies are greedy, on the held-out problems; the wall time is that of the whole command."""
    load = machine_load()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train_async.py", "--config", CONFIG, "--run-dir", folder]
        command += ["--seed", str(seed), "--rollout-seed", str(seed)]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
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
