"""One run loses its router, its engine, two learners and two rollout workers, and is then interrupted with Ctrl-C.

Most of the time goes into starting runs, so one run shows all of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

import pytest

from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from miles_async.adapters.storage.run_store import SqliteRunStore
from miles_async.events import EngineChanged, Event, GroupMoved, LearnerRestored, PublishEnded, RunDrained, StepEnded
from miles_async.observability.trace.event_log import read_events
from miles_async.scheduling.ledger import GroupState
from tests.audit import Audit
from tests.stack.job import Job, job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS

E = TypeVar("E", bound=Event)
BATCHES = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")
SAVE_INTERVAL = 3
LOST = (signal.SIGKILL, signal.SIGSTOP)
"""A process dies, or hangs and is ended by the run."""


@dataclass
class Interrupted:
    """What is left of the run."""

    folder: Path
    page: dict[str, Any]
    """The live page's data while the run trained."""
    engines: list[int]
    """The process id of the engine's server, before the first loss and after each."""
    learners: list[int]
    """The process id of the learner, after the learners were lost and after each loss of a rollout worker."""
    code: int
    left_running: dict[int, str]
    out: str
    err: str
    events: list[Event]

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "latest"

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def shown_by_page(running: Job) -> dict[str, Any]:
    address = re.search(r"page +(http://127\.0\.0\.1:\d+/)", running.err)
    assert address is not None, running.err
    with urlopen(f"{address[1]}state.json", timeout=PATIENCE_SECONDS) as state:
        return json.load(state)


def trains(running: Job, batches: int) -> None:
    for _ in range(batches):
        running.says_again("Staleness stats", START_SECONDS)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("interrupted")
    flags = ("--drain-seconds", str(PATIENCE_SECONDS), "--max-restarts", "1", "--store-dir", str(folder / "stores"))
    saved = ("--save", str(folder / "saved"), "--save-interval", str(SAVE_INTERVAL))
    with job(folder, *BATCHES, *flags, *saved) as running:
        running.says("Staleness stats", START_SECONDS)
        page = shown_by_page(running)
        for actor in ("ray::Router", "ray::Engine"):
            os.kill(running.process(actor), signal.SIGKILL)
        running.complains("engine fenced", START_SECONDS)
        running.complains("engine routed", START_SECONDS)
        engines, learners = [running.process("sglang::scheduler")], list[int]()
        for number in LOST:
            trains(running, SAVE_INTERVAL + 1)  # with the batch before, that is one more than a checkpoint needs
            os.kill(running.process("ray::LearnerRank"), number)
            running.says_again("a new rollout worker was ready", START_SECONDS)
            engines.append(running.process("sglang::scheduler"))
        trains(running, 2)  # the line of the second batch follows the step of the first one
        learners.append(running.process("ray::LearnerRank"))
        for number in LOST:
            os.kill(running.process("ray::RolloutWorker"), number)
            running.says_again("a new rollout worker was ready", START_SECONDS)
            trains(running, 2)
            engines.append(running.process("sglang::scheduler"))
            learners.append(running.process("ray::LearnerRank"))
        running.press_ctrl_c()
        code = running.ended(within=2 * PATIENCE_SECONDS)
        left = running.left_running()
        events = list(read_events(folder / "runs" / "latest" / "events.jsonl"))
        return Interrupted(folder, page, engines, learners, code, left, running.out, running.err, events)


def test_a_run_goes_on_after_its_router_actor_and_its_engine_actor_were_killed(interrupted: Interrupted) -> None:
    assert interrupted.err.count("engine routed") == 1, interrupted.of(EngineChanged)
    assert interrupted.out.count("Staleness stats") >= 2
    assert not (interrupted.run / "dead_letters.jsonl").exists()


def test_lost_learners_and_rollout_workers_are_replaced_and_everything_else_is_kept(interrupted: Interrupted) -> None:
    assert len(set(interrupted.engines)) == 1, interrupted.of(EngineChanged)
    assert len(set(interrupted.learners)) == 1, "a lost rollout worker costs no learner"
    assert len(interrupted.of(LearnerRestored)) == 2, "a lost rollout worker costs no weights"


def test_each_prompt_is_trained_once_by_the_surviving_weights(interrupted: Interrupted) -> None:
    audit, trained = Audit(staleness_limit=2), Counter[str]()
    last = -1
    for event in interrupted.events:
        audit.observe(event)
        match event:
            case GroupMoved(after="trained", feed_index=prompt):
                trained[prompt] += 1
            case GroupMoved(before="trained" | "published", after="queued", feed_index=prompt):
                trained[prompt] -= 1
            case StepEnded(rollout=rollout):
                assert rollout == last + 1, "no batch was skipped or repeated"
                last = rollout
            case LearnerRestored(rollout=last):
                pass
            case _:
                pass
    assert audit.violations == []
    assert set(trained.values()) <= {0, 1}


def test_a_lost_learner_returns_to_its_checkpoint_and_uses_no_version_number_again(interrupted: Interrupted) -> None:
    restored = interrupted.of(LearnerRestored)
    assert all(event.rollout % SAVE_INTERVAL == SAVE_INTERVAL - 1 for event in restored)
    assert all(event.version > event.kept_version for event in restored)


def test_every_step_and_every_publish_reports_what_it_took(interrupted: Interrupted) -> None:
    for step in interrupted.of(StepEnded):
        assert step.finite
        assert step.metrics["tokens_per_second"] == pytest.approx(step.tokens / step.seconds)
    live = [event for event in interrupted.of(PublishEnded) if event.live]
    versions = [event.version for event in live]
    assert versions == sorted(versions)
    # A rollout worker that takes over publishes the newest version again: it does not know which engines have it.
    assert len(versions) - len(set(versions)) <= len(LOST), "otherwise a version goes live once"
    assert all(sum(event.pause.values()) == pytest.approx(event.paused_seconds) for event in live)


def test_the_log_names_the_address_of_the_live_page(interrupted: Interrupted) -> None:
    assert interrupted.page["now"]["run"]["rollouts"] == 500


def test_ctrl_c_ends_the_run_after_its_step_and_leaves_nothing_running(interrupted: Interrupted) -> None:
    assert interrupted.code == 130
    assert interrupted.left_running == {}
    assert "stopping: groups in flight" in interrupted.err
    assert "Traceback" not in interrupted.err
    assert "ended      interrupted" in interrupted.out


def test_a_run_that_ctrl_c_ended_has_a_summary_a_report_and_a_checkpoint(interrupted: Interrupted) -> None:
    summary = json.loads((interrupted.run / "summary.json").read_text())
    assert summary["reason"] == "interrupted"
    newest = CheckpointFolder(interrupted.folder / "saved").latest()
    assert newest.rollout == read_progress(newest.folder)["rollout"] == summary["rollouts"] - 1, "saved at the end"
    assert b"interrupted" in (interrupted.run / "report.html").read_bytes()


def test_the_groups_that_a_drained_run_keeps_are_in_its_store(interrupted: Interrupted) -> None:
    [drain] = interrupted.of(RunDrained)
    assert (drain.interrupted, drain.abandoned, drain.unsaved) == (0, 0, 0)
    name = interrupted.run.resolve().name
    with closing(SqliteRunStore(interrupted.folder / "stores" / name, name, read_only=True)) as store:
        stored = asyncio.run(store.read())
    assert stored is not None
    kept = [group for group in stored.groups if group.content and group.state is not GroupState.TRAINED]
    assert len(kept) == drain.kept > 0
