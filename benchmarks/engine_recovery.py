"""Measures how soon a run continues after processes that it needs are killed.

    python -m benchmarks.engine_recovery [--seconds 10]

Starts a fully asynchronous run on the CPU twice. In the first run, the process group of its only engine is killed
(SIGKILL); in the second run, the Ray actors that own the router and the engine, which takes both servers along. Times
are in seconds after the kill. `next step` is the end of the first step that began after the first new group.
`engine start` is the time that the engine took to start at the beginning of the run, while the learner was starting
too. Rates are response tokens per second, over `--seconds` before the kill and after the first group from the new
engine. Prints a table and writes benchmarks/results/engine_recovery.json.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.records import record
from miles_async.adapters.sglang.launch import ENGINE_MODULE
from miles_async.events import EngineChanged, Event, GroupGenerated, GroupMoved, StartupChanged, StepEnded
from miles_async.observability.trace.event_log import read_events
from tests.audit import Audit

COMMAND = [
    *(sys.executable, "train_async.py", "--config", "configs/arithmetic-cpu.yaml", "--rollout-function-path"),
    "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async",
    *("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "100000", "--no-progress-bar"),
]
START_SECONDS = 300.0
"""Time limit for a run to start, and for an engine to start again."""

Kill = Callable[[list[psutil.Process]], None]
"""Kills some of the processes of a run."""


def kill_engine(processes: list[psutil.Process]) -> None:
    [engine] = filter(_is_engine, processes)
    os.killpg(engine.pid, signal.SIGKILL)


def kill_actors(processes: list[psutil.Process]) -> None:
    actors = [process for process in processes if process.cmdline()[:1] in (["ray::Router"], ["ray::Engine"])]
    assert len(actors) == 2, [process.cmdline() for process in processes]
    for actor in actors:
        actor.kill()


CASES: dict[str, Kill] = {"engine": kill_engine, "Router and Engine actors": kill_actors}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose processes were killed."""

    killed: float
    """Time of the kill."""
    engine_start: float
    """Seconds that the engine took to start at the beginning of the run."""
    events: list[Event]
    dead_letters: int


def play(folder: Path, seconds: float, kill: Kill) -> Run:
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen([*COMMAND, "--run-dir", str(folder / "runs")], stdout=log, stderr=log)
    try:
        _wait(lambda: len(_generated(folder)) > 50, START_SECONDS)
        time.sleep(seconds)
        processes = psutil.Process(run.pid).children(recursive=True)
        killed = time.time()
        kill(processes)
        _wait(lambda: any(event.time > killed and event.state == "routed" for event in _changes(folder)), START_SECONDS)
        time.sleep(seconds + 5)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)
    events = list(_events(folder))
    starts = [
        event.seconds for event in events if isinstance(event, StartupChanged) and event.part.startswith("engine")
    ]
    engine_start = next(seconds for seconds in starts if seconds is not None)
    dead_letters = folder / "runs" / "latest" / "dead_letters.jsonl"
    return Run(
        killed=killed,
        engine_start=engine_start,
        events=events,
        dead_letters=len(dead_letters.read_text().splitlines()) if dead_letters.exists() else 0,
    )


def _is_engine(process: psutil.Process) -> bool:
    """Return whether the process is an engine and the leader of its process group."""
    return ENGINE_MODULE in process.cmdline() and os.getpgid(process.pid) == process.pid


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


def figures(run: Run, seconds: float) -> dict[str, float]:
    killed, events = run.killed, run.events
    changes = [event for event in events if isinstance(event, EngineChanged)]
    groups = [event for event in events if isinstance(event, GroupGenerated)]
    back = next(event.time for event in groups if event.time > killed and event.started > killed)
    lost = {event.feed_index for event in events if isinstance(event, GroupMoved) and event.reason == "engine_lost"}
    later = {event.feed_index for event in events if isinstance(event, GroupMoved) and event.after == "in_flight"
             and event.time > killed}  # fmt: skip
    steps = [event for event in events if isinstance(event, StepEnded)]
    audit = Audit(None)
    for event in events:
        audit.observe(event)

    def rate(first: float) -> float:
        return sum(group.response_tokens for group in groups if first <= group.time < first + seconds) / seconds

    return {
        "engine start, s": run.engine_start,
        "fenced, s": next(event.time for event in changes if event.state == "fenced") - killed,
        "routed again, s": [event.time for event in changes if event.state == "routed"][-1] - killed,
        "first group, s": back - killed,
        "next step, s": next(event.time for event in steps if event.started > back) - killed,
        "tokens/s before": rate(killed - seconds),
        "tokens/s after": rate(back),
        "groups in flight at the kill": len(lost),
        "of these not generated again": len(lost - later),
        "groups dead-lettered": run.dead_letters,
        "audit violations": len(audit.violations),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="time over which rates are measured (default: 10)")
    seconds = parser.parse_args().seconds
    results = {}
    for case, kill in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            results[case] = figures(play(Path(folder), seconds, kill), seconds)
        print(f"killed: {case}")
        for name, value in results[case].items():
            print(f"  {name:<30} {value:>10.1f}")
    record("engine_recovery", results)


if __name__ == "__main__":
    main()
