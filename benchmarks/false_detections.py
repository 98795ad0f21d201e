"""Runs an undisturbed job beside one busy loop per core, and counts what is reported as lost.

    python -m benchmarks.false_detections [--minutes 60] [--pause 0]

The job is that of `make chaos`, with its time limits: within these, each process that is killed or stopped is found
within 15 seconds. `--pause` seconds before each batch leave the cores to other work. Writes
benchmarks/results/false_detections.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.busy_loops import busy_loops
from benchmarks.chaos.play import flags
from benchmarks.records import machine_load, record
from miles_async.events import EngineChanged, Event, ProcessSilent, RouterChanged, StepEnded, WarningRaised
from miles_async.observability.trace.event_log import read_events
from tests.stack.job import job

BATCHES = 1_000_000
"""More batches than the job trains in the time."""
LOAD_SECONDS = 60.0
"""Interval between two looks at the load of the machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the job (default: 60)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each batch (default: 0)")
    options = parser.parse_args()
    with busy_loops(), TemporaryDirectory() as folder:
        result = run(Path(folder), options.minutes * 60, options.pause)
    print(json.dumps(result, indent=2))
    record("false_detections", result)


def run(folder: Path, seconds: float, pause: float) -> dict[str, Any]:
    """Run the job for this time, and drain it. Raises SystemExit if it ends by itself."""
    fault = {"kind": "delay", "point": "learner.train.before", "process": "rollout_worker"}
    delay = json.dumps([{**fault, "call": 1, "times": BATCHES, "seconds": pause}])
    arguments = [*flags(folder, BATCHES), *(("--inject-faults", delay) if pause else ())]
    loads = []
    with job(folder, *arguments) as running:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                code = running.ended(within=min(left, LOAD_SECONDS))
            except subprocess.TimeoutExpired:
                loads.append(machine_load())
                continue
            raise SystemExit(f"the job ended with {code}: {running.err[-2000:]}")
        os.kill(running.pid, signal.SIGTERM)
        code = running.ended(within=LOAD_SECONDS)
    events = read_events(folder / "runs" / "latest" / "events.jsonl")
    return {"minutes": seconds / 60, "pause": pause, "loads": loads, "exit_code": code, **counts(events)}


def counts(events: Iterable[Event]) -> dict[str, Any]:
    """Batches and reported losses; for each process, the longest silence in seconds."""
    batches, lost, silences = 0, Counter[str](), dict[str, float]()
    for event in events:
        match event:
            case StepEnded():
                batches += 1
            case EngineChanged(state="fenced" | "lost"):
                lost[f"{event.engine} {event.state}: {event.reason}"] += 1
            case RouterChanged(up=False):
                lost["the router does not answer"] += 1
            case WarningRaised():
                lost[event.text] += 1
            case ProcessSilent():
                silences[event.process] = max(event.seconds, silences.get(event.process, 0.0))
            case _:
                pass
    return {"batches": batches, "lost": dict(lost), "longest_silences": silences}


if __name__ == "__main__":
    main()
