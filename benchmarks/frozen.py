"""Measures how soon a frozen process becomes visible in output, metrics, verdict, live page and alerts.

    python -m benchmarks.frozen [PART ...]

The parts are the learner, the engines and the rollout worker. For each part, starts the main job and a real Prometheus,
stops the processes of the part (SIGSTOP) and observes the run from outside. Prints a table of seconds and writes
benchmarks/results/frozen.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.records import record, recorded
from dashboards.prometheus import Prometheus
from tests.stack.job import Job, job

WITHIN_SECONDS = 15.0
WARN_SECONDS = 5
FLAGS = (
    "--warm-start-max-steps 0 --eval-size 64 --num-rollout 5000 --progress-bar false "
    f"--no-progress-warn-seconds {WARN_SECONDS}"
).split()
FROZEN = {
    "learner": ("ray::LearnerRank", "trainer-bound", "learner-0"),
    "engines": ("sglang", "rollout-bound", "engine-0"),
    "rollout worker": ("ray::RolloutWorker", "rollout-bound", "rollout"),
}
"""For each part: text in the command lines of its processes, the expected verdict, and the process it should name."""


@contextmanager
def stopped(running: Job, command: str) -> Iterator[None]:
    """Stop all processes of the job whose command line contains `command`, until the block ends."""
    pids = [pid for pid, line in running.left_running().items() if command in line and "router" not in line]
    assert pids, f"no command line contains {command}: {running.left_running()}"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def page_shows(url: str, verdict: str, silent: str) -> bool:
    """Return whether the live page shows the verdict and the silent process."""
    with urllib.request.urlopen(url.replace("/metrics", "/state.json"), timeout=5) as answer:
        now = json.load(answer)["now"]
    return now["verdict"]["verdict"] == verdict and silent in now["silent"]


def watch(running: Job, url: str, prometheus: Prometheus, command: str, verdict: str, silent: str) -> dict[str, Any]:
    """Return the seconds from the freeze to each of its signs, or None for a sign not seen within a minute."""
    lines = running.out.count("Warning: No progress")
    before = metrics(url)["miles_async_since_progress_seconds"]
    signs: dict[str, Callable[[], bool]] = {
        "metrics": lambda: metrics(url).get(f'miles_async_process_silent_seconds{{name="{silent}"}}', 0) > 0,
        "verdict": lambda: (
            metrics(url)[f'miles_async_verdict{{verdict="{verdict}"}}'] == 1
            and f"{silent} has not answered" in running.err
        ),
        "page": lambda: page_shows(url, verdict, silent),
        "stall line": lambda: running.out.count("Warning: No progress") > lines,
        "no progress": lambda: metrics(url)["miles_async_since_progress_seconds"] > before + 2,
        "alert": lambda: "ProcessSilent" in prometheus.firing(),
    }
    seen: dict[str, Any] = dict.fromkeys(signs)
    with stopped(running, command):
        frozen = time.monotonic()
        while None in seen.values() and time.monotonic() - frozen < 60:
            for name, sign in signs.items():
                if seen[name] is None and sign():
                    seen[name] = round(time.monotonic() - frozen, 1)
            time.sleep(0.2)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", default=list(FROZEN), metavar="PART", help=f"{', '.join(FROZEN)} (default: all)"
    )
    seen: dict[str, dict[str, Any]] = {}
    for part in parser.parse_args().parts:
        command, verdict, silent = FROZEN[part]
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            running = stack.enter_context(job(Path(folder), *FLAGS))
            running.says("Staleness stats", within=120)
            found = re.search(r"page +(http://127.0.0.1:\d+/)", running.err)
            assert found is not None, running.err
            url = f"{found[1]}metrics"
            prometheus = stack.enter_context(Prometheus(Path(folder) / "runs"))
            time.sleep(8)  # a verdict needs some seconds of training
            seen[part] = watch(running, url, prometheus, command, verdict, silent)
    print(f"{'frozen':16}" + "".join(f"{name:>14}" for name in next(iter(seen.values()))))
    for part, signs in seen.items():
        print(f"{part:16}" + "".join(f"{seconds!s:>14}" for seconds in signs.values()))
    record("frozen", recorded("frozen") | seen)


if __name__ == "__main__":
    main()
