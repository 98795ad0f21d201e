"""Measures how soon generation continues after the only engine of a run is killed.

    python -m benchmarks.engine_recovery [--seconds 10]

Starts a fully asynchronous run on the CPU and kills the process group of its engine (SIGKILL). Times are in seconds
after the kill. `engine start` is the time that the engine took to start at the beginning of the run, while the learner
was starting too. Rates are response tokens per second, over `--seconds` before the kill and after the first group from
the new engine. Prints a table and writes benchmarks/results/engine_recovery.json.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.records import record
from miles_async.events import EngineChanged, Event, GroupGenerated, GroupMoved
from miles_async.observability.diagnosis.audit import Audit
from miles_async.observability.trace.event_log import read_events

COMMAND = [
    *(sys.executable, "train_async.py", "--config", "configs/arithmetic-cpu.yaml", "--rollout-function-path"),
    "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async",
    *("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "100000", "--no-progress-bar"),
]


def play(folder: Path, seconds: float) -> tuple[float, float, list[Event]]:
    """Run the job, and return when the engine was killed, how many seconds its first start took, and all events."""
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen([*COMMAND, "--run-dir", str(folder / "runs")], stdout=log, stderr=log)
    try:
        _wait(lambda: len(_generated(folder)) > 50, 120)
        time.sleep(seconds)
        [engine] = [child for child in psutil.Process(run.pid).children(recursive=True) if _is_engine(child)]
        killed = time.time()
        os.killpg(engine.pid, signal.SIGKILL)
        _wait(lambda: any(event.time > killed and event.state == "routed" for event in _changes(folder)), 120)
        time.sleep(seconds + 5)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)
    text = re.sub(r"\x1b\[[0-9;]*m", "", (folder / "log").read_text())
    started = re.search(r"engine is up.*?seconds=([\d.]+)", text)
    assert started is not None, text[-2000:]
    return killed, float(started[1]), list(_events(folder))


def _is_engine(process: psutil.Process) -> bool:
    """Return whether the process is an engine and the leader of its process group."""
    return "sglang.launch_server" in process.cmdline() and os.getpgid(process.pid) == process.pid


def _events(folder: Path) -> Iterator[Event]:
    trace = folder / "runs" / "latest" / "events.jsonl"
    return iter(read_events(trace)) if trace.exists() else iter(())


def _generated(folder: Path) -> list[GroupGenerated]:
    return [event for event in _events(folder) if isinstance(event, GroupGenerated)]


def _changes(folder: Path) -> list[EngineChanged]:
    return [event for event in _events(folder) if isinstance(event, EngineChanged)]


def _wait(reached: Callable[[], bool], within: float) -> None:
    deadline = time.monotonic() + within
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit(f"the run did not reach the expected state within {within:.0f} s")
        time.sleep(0.5)


def figures(killed: float, start: float, events: list[Event], seconds: float) -> dict[str, float]:
    changes = [event for event in events if isinstance(event, EngineChanged)]
    groups = [event for event in events if isinstance(event, GroupGenerated)]
    back = next(event.time for event in groups if event.time > killed and event.started > killed)
    lost = {event.feed_index for event in events if isinstance(event, GroupMoved) and event.reason == "engine_lost"}
    later = {event.feed_index for event in events if isinstance(event, GroupMoved) and event.after == "in_flight"
             and event.time > killed}  # fmt: skip
    audit = Audit(None)
    for event in events:
        audit.observe(event)

    def rate(first: float) -> float:
        return sum(group.response_tokens for group in groups if first <= group.time < first + seconds) / seconds

    return {
        "engine start, s": start,
        "fenced, s": next(event.time for event in changes if event.state == "fenced") - killed,
        "routed again, s": [event.time for event in changes if event.state == "routed"][-1] - killed,
        "first group, s": back - killed,
        "tokens/s before": rate(killed - seconds),
        "tokens/s after": rate(back),
        "groups in flight at the kill": len(lost),
        "of these not generated again": len(lost - later),
        "audit violations": len(audit.violations),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="time over which rates are measured (default: 10)")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        found = figures(*play(Path(folder), seconds), seconds)
    for name, value in found.items():
        print(f"{name:<30} {value:>10.1f}")
    record("engine_recovery", found)


if __name__ == "__main__":
    main()
