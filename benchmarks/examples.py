"""Runs the examples of agents and environments with several seeds: held-out accuracy and wall time.

    python -m benchmarks.examples [--seeds N] [NAME ...]

Each run begins with its warm start. Prints a line per run, and writes benchmarks/results/examples.json and
docs/how-to/examples.svg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.records import machine_load, record, recorded

EXAMPLES = {
    "memory-agent": "an agent that compacts its memory",
    "verifiers": "an environment of verifiers",
    "openenv": "an environment of OpenEnv",
}
"""Titles of the plots by the name of the configuration, `configs/NAME-cpu.yaml`."""
PICTURE = Path("docs/how-to/examples.svg")
mpl.rcParams["svg.hashsalt"] = "miles_async"  # the same figures give the same file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of runs per example (default: 3)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(EXAMPLES)} (default: all)")
    options = parser.parse_args()
    result = recorded("examples")
    for name in options.names or EXAMPLES:
        result[name] = []
        for seed in range(1, options.seeds + 1):
            result[name].append(run(name, seed))
            print(name, json.dumps(result[name][-1]), flush=True)
            record("examples", result)
    draw(result)


def run(name: str, seed: int) -> dict[str, Any]:
    """Run an example once. `curve` has the number of trained batches and the greedy accuracy on held-out tasks."""
    load = machine_load()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train_async.py", "--config", f"configs/{name}-cpu.yaml", "--seed", str(seed)]
        command += ["--rollout-seed", str(seed), "--run-dir", f"{folder}/runs", "--cache-dir", f"{folder}/cache"]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        events = map(json.loads, Path(f"{folder}/runs/latest/events.jsonl").read_text().splitlines())
        curve = [[event["rollout"] + 1, event["accuracy"]] for event in events if event.get("type") == "Evaluated"]
    (_, before), (_, after) = curve[0], curve[-1]
    return {
        "seed": seed,
        "gain": round(after - before, 4),
        "wall_seconds": round(seconds, 1),
        "load": load,
        "curve": curve,
    }


def draw(result: dict[str, list[dict[str, Any]]]) -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    shown = [name for name in EXAMPLES if name in result]
    plots = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, name in zip(plots, shown, strict=True):
        curves = np.array([run["curve"] for run in result[name]])  # [seeds, evaluations, 2]
        batches, accuracy = curves[0, :, 0], curves[:, :, 1]
        axes.plot(batches, accuracy.mean(0), color="#1f4e79")
        axes.fill_between(batches, accuracy.min(0), accuracy.max(0), color="#1f4e79", alpha=0.2, linewidth=0)
        axes.set(xlabel="trained batches", title=EXAMPLES[name], ylim=(0, 1))
    plots[0].set(ylabel="held-out accuracy")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
