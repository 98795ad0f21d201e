"""Measures how many tokens are wasted if 5 % of the samples of an agent fail, and whether the model learns as well.

    python -m benchmarks.failing_samples [--rollouts 60] [--earlier CHECKOUT]

Trains the tiny model on sums several times: without failures, and with a tool server that fails for 5 % of the samples
after their last token. With `--earlier`, the second case is repeated with another checkout of this project, for example
one of a version that generates the whole group of a failed sample again.

Wasted tokens are those of responses that ended and are in no group that was trained or was ready at the end, as a share
of the tokens of all responses. Prints a table and writes benchmarks/results/failing-samples.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import machine_load, record
from miles_async.events import GroupGenerated, GroupMoved
from miles_async.observability.trace.event_log import read_events

COMMAND = [
    *(sys.executable, "train_async.py", "--config", "configs/arithmetic-cpu.yaml", "--no-progress-bar"),
    *("--rollout-function-path", "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"),
    *("--custom-generate-function-path", "benchmarks.failing_samples.generate"),
]
SHARE = 0.05
_rng = random.Random()


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Sample one turn, and then call a tool server that fails. Evaluations, which are greedy, do not fail."""
    await args.turns.sample(sample, sampling_params)
    if sampling_params["temperature"] == 0 or sample.status == "aborted":
        return sample
    _log(sample.response_length)
    if _rng.random() < float(os.environ["FAILING_SAMPLES_SHARE"]):
        raise ConnectionError("the tool server is down")
    return sample


def _log(tokens: int) -> None:
    with Path(os.environ["FAILING_SAMPLES_LOG"]).open("a") as log:
        log.write(f"{tokens}\n")


def play(checkout: Path, share: float, rollouts: int) -> dict[str, Any]:
    """Train once with the code in `checkout`. Raises CalledProcessError if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        sampled = Path(folder) / "sampled"
        environment = {
            "PYTHONPATH": str(checkout),
            "FAILING_SAMPLES_LOG": str(sampled),
            "FAILING_SAMPLES_SHARE": str(share),
        }
        options = ("--num-rollout", str(rollouts), "--run-dir", f"{folder}/runs")
        subprocess.run([*COMMAND, *options], cwd=checkout, env=os.environ | environment, check=True)
        [run] = {path.parent.resolve() for path in Path(folder, "runs").glob("*/summary.json")}
        summary = json.loads((run / "summary.json").read_text())
        lost = {"filtered", "stale", "nonfinite"}
        generated = discarded = 0
        for event in read_events(run / "events.jsonl"):
            if isinstance(event, GroupGenerated):
                generated += event.response_tokens
            elif isinstance(event, GroupMoved) and event.reason in lost:
                discarded += event.discarded_tokens
        tokens = sum(map(int, sampled.read_text().split()))
    return {
        "failing": share,
        "tokens": tokens,
        "wasted_share": (tokens - generated + discarded) / tokens,
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "accuracy_after_interval": summary["accuracy_after_interval"],
        "dropped": summary["dropped"],
        "training_seconds": summary["training_seconds"],
        "machine_load": machine_load(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failing_samples")
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--earlier", type=Path, help="folder of another checkout with this file")
    options = parser.parse_args()
    here = Path.cwd()
    cases = {"no failures": (here, 0.0), "failed samples alone": (here, SHARE)}
    if options.earlier is not None:
        cases["whole groups"] = (options.earlier, SHARE)
    rows = {name: play(checkout, share, options.rollouts) for name, (checkout, share) in cases.items()}
    for name, row in rows.items():
        print(f"{name:22} wasted {row['wasted_share']:6.1%}  accuracy {row['accuracy_after']:.3f}")
    record("failing-samples", rows)


if __name__ == "__main__":
    main()
