"""SIGTERM drains the run and keeps what has finished; a run that loses Ray's head node ends with a sentence."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.events import Event, Pulse, RunDrained, StepEnded, StepStarted
from miles_async.observability.trace.event_log import read_events
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import StoredRun
from tests.stack.job import Job, job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS, wait_until

LONG = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")


def events_of(folder: Path) -> list[Event]:
    return list(read_events(folder / "runs" / "latest" / "events.jsonl"))


def drained(folder: Path) -> RunDrained:
    [event] = [event for event in events_of(folder) if isinstance(event, RunDrained)]
    return event


def stopped_in_step(folder: Path, learner: int) -> bool:
    """Stop the learner. Returns whether it is in a step now; otherwise the learner goes on."""
    os.kill(learner, signal.SIGSTOP)
    stopped_at = time.time()

    def reported() -> bool:
        """Whether the driver has received all that the learner did before."""
        return any(isinstance(event, Pulse) and event.time > stopped_at + 1.0 for event in events_of(folder))

    wait_until(reported, "events arrive without the learner", every=0.5)
    steps = [event for event in events_of(folder) if isinstance(event, StepStarted | StepEnded)]
    in_step = isinstance(steps[-1], StepStarted)
    if not in_step:
        os.kill(learner, signal.SIGCONT)
    return in_step


def ended_quietly(run: Job) -> None:
    """Check what a run has printed after SIGTERM."""
    assert "send SIGTERM again to stop immediately" in run.err
    assert "*** SIGTERM received" not in run.err, "native code printed its stack"
    assert "Traceback" not in run.err


def stored(folder: Path) -> StoredRun:
    run = (folder / "runs" / "latest").resolve()
    store = SqliteRunStore(run / "store", run.name, read_only=True)
    try:
        left = asyncio.run(store.read())
    finally:
        store.close()
    assert left is not None
    return left


def test_sigterm_ends_the_run_with_summary_report_and_checkpoint_and_leaves_nothing_running(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    patient = ("--drain-seconds", str(PATIENCE_SECONDS))
    with job(tmp_path, *LONG, *patient, "--save", str(saved)) as running:
        running.says("Staleness stats", START_SECONDS)
        os.kill(running.pid, signal.SIGTERM)
        assert running.ended(within=2 * PATIENCE_SECONDS) == 128 + signal.SIGTERM
        assert running.left_running() == {}
    ended_quietly(running)
    assert running.alarms == []
    assert "ended      interrupted" in running.out
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    assert summary["reason"] == "interrupted"
    newest = CheckpointFolder(saved).latest().folder
    assert read_progress(newest)["rollout"] == summary["rollouts"] - 1
    assert b"interrupted" in (tmp_path / "runs" / "latest" / "report.html").read_bytes()
    drain = drained(tmp_path)
    assert (drain.interrupted, drain.abandoned, drain.unsaved) == (0, 0, 0)
    kept = [group for group in stored(tmp_path).groups if group.content and group.state is not GroupState.TRAINED]
    assert len(kept) == drain.kept > 0


def test_sigterm_to_the_process_group_abandons_a_step_that_takes_too_long_and_keeps_its_groups(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, "--drain-seconds", "1") as running:
        running.says("Staleness stats", START_SECONDS)
        learner = running.process("ray::LearnerRank")
        wait_until(lambda: stopped_in_step(tmp_path, learner), "the learner is stopped in a step", within=START_SECONDS)
        os.killpg(running.pid, signal.SIGTERM)
        assert running.ended(within=PATIENCE_SECONDS) == 128 + signal.SIGTERM
        assert running.left_running() == {}
    ended_quietly(running)
    assert "needed more than --drain-seconds" in running.err
    begun = [event for event in events_of(tmp_path) if isinstance(event, StepStarted)][-1]
    assert drained(tmp_path).abandoned == len(begun.groups)
    left = {group.sequence: group for group in stored(tmp_path).groups}
    assert all(left[sequence].content is not None for sequence in begun.groups)
    assert {left[sequence].state for sequence in begun.groups} == {GroupState.LEASED}


def test_a_run_that_loses_the_ray_head_node_ends_with_an_error_message_and_a_summary(tmp_path: Path) -> None:
    with job(tmp_path, *LONG) as running:
        running.says("Staleness stats", START_SECONDS)
        os.kill(running.process("gcs_server"), signal.SIGKILL)
        assert running.ended(within=PATIENCE_SECONDS) == 1
        assert running.left_running() == {}
    assert "train_async.py: the head node of Ray at " in running.err
    assert "Traceback" not in running.err
    assert "has not answered" in json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())["reason"]
