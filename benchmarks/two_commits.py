"""Compares the throughput of this checkout with that of another commit, in one run on one machine.

    python -m benchmarks.two_commits CHECKOUT [--rounds 2] [--job NAME]

CHECKOUT is a folder with the other commit and its environment in `.venv`. Each round trains the jobs of `make run` and
`make run-tiny` in both checkouts, in the order this, other, other, this, so that a machine that slows down or speeds up
favours neither. Groups per second count from the first optimizer step of a run to its last one. Prints a line per run
and the ratio of the means, and writes benchmarks/results/two_commits.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.records import record
from benchmarks.study.runs import FULLY_ASYNC, run_to_its_end

JOBS = {"make run": ("configs/smollm2-cpu.yaml", 10), "make run-tiny": ("configs/arithmetic-cpu.yaml", 80)}
"""The configuration and the number of batches of each job."""
NEVER = "10000"
"""Batches between two evaluations, so that no evaluation is part of the time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with the other commit and its environment")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of four runs per job (default: 2)")
    parser.add_argument("--job", choices=JOBS, action="append", help="job to compare (default: both)")
    options = parser.parse_args()
    this, other = Path(__file__).parent.parent, options.checkout.resolve()
    names = {this: "this", other: _commit(other)}
    results = {}
    for job in options.job or JOBS:
        rates: dict[str, list[float]] = {name: [] for name in names.values()}
        for checkout in (this, other, other, this) * options.rounds:
            rates[names[checkout]].append(rate(checkout, *JOBS[job]))
            print(f"{job}, {names[checkout]}: {rates[names[checkout]][-1]:.3f} groups per second", flush=True)
        ratio = fmean(rates["this"]) / fmean(rates[names[other]])
        print(f"{job}: {ratio:.2f} times as many groups per second as {names[other]}")
        results[job] = {"groups per second": rates, "ratio": round(ratio, 3)}
    record("two_commits", results)


def rate(checkout: Path, config: str, batches: int) -> float:
    """Groups per second of one run. The first batch is a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(checkout / ".venv/bin/python"), "train_async.py", "--config", config]
        command += ["--rollout-function-path", FULLY_ASYNC, "--num-rollout", str(batches), "--eval-interval", NEVER]
        run_to_its_end([*command, "--run-dir", folder], checkout)
        # Not `read_events`: the other commit may write other fields.
        lines = (Path(folder) / "latest" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    ends = [event["time"] for event in events if event["type"] == "StepEnded"]
    groups = [len(event["groups"]) for event in events if event["type"] == "StepStarted"]
    return sum(groups[1:]) / (ends[-1] - ends[0])


def _commit(checkout: Path) -> str:
    command = ("git", "rev-parse", "--short=12", "HEAD")
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
