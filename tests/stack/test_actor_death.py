"""The processes that own the router and an engine are killed: both are started again, and training goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.stack.job import Job, job

LONG = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "5000")
START_SECONDS = 280


def test_training_goes_on_after_the_router_actor_and_the_engine_actor_were_killed(tmp_path: Path) -> None:
    with job(tmp_path, *LONG) as running:
        running.says("Staleness stats", START_SECONDS)
        for actor in ("ray::Router", "ray::Engine"):
            os.kill(_process(running, actor), signal.SIGKILL)
        running.complains("engine fenced", START_SECONDS)
        _wait_for_next(running, "engine routed", running.err)
        _wait_for_next(running, "Staleness stats", running.out)
        running.press_ctrl_c()
        assert running.ended(within=60) == 130
    assert not (tmp_path / "runs" / "latest" / "dead_letters.jsonl").exists()


def _wait_for_next(running: Job, words: str, before: str) -> None:
    """Wait until the job has printed `words` once more than in its output `before`."""
    count = before.count(words)
    running._until(
        lambda: (running.err + running.out).count(words) > count, f"say {words!r} again", within=START_SECONDS
    )


def _process(running: Job, command: str) -> int:
    [pid] = [pid for pid, line in running.left_running().items() if line.startswith(command)]
    return pid
