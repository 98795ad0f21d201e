"""A run survives killed actors and lost learners; Ctrl-C ends it after the step, a second one at once.

Most of the time goes into starting runs, so one run shows the killed actors, the lost learners and the first Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from miles_async.adapters.sglang.launch import ENGINE_MODULE
from miles_async.adapters.storage.checkpoints import CheckpointFolder
from miles_async.events import GroupMoved, LearnerRestored, StepEnded
from miles_async.observability.diagnosis.audit import Audit
from miles_async.observability.trace.event_log import read_events
from tests.stack.job import job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS

LONG = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")


@dataclass
class Interrupted:
    """What is left of a run that lost two actors, then two learners, and was then interrupted with Ctrl-C."""

    folder: Path
    page: dict[str, Any]
    """The live page's data while the run trained."""
    engines: list[int]
    """The process id of the engine's server, before the first learner was lost and after each learner was replaced."""
    code: int
    left_running: dict[int, str]
    out: str
    err: str


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    folder = tmp_path_factory.mktemp("interrupted")
    flags = ("--drain-seconds", str(PATIENCE_SECONDS), "--save", str(folder / "saved"), "--save-interval", "3")
    with job(folder, *LONG, *flags) as running:
        running.says("Staleness stats", START_SECONDS)
        address = re.search(r"page +(http://127\.0\.0\.1:\d+/)", running.err)
        assert address is not None, running.err
        with urlopen(f"{address[1]}state.json", timeout=PATIENCE_SECONDS) as state:
            page = json.load(state)
        for actor in ("ray::Router", "ray::Engine"):
            os.kill(running.process(actor), signal.SIGKILL)
        running.complains("engine fenced", START_SECONDS)
        running.complains("engine routed", START_SECONDS)
        engines = [running.process("sglang::scheduler")]
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for _ in range(4):  # with the batch before, that is one more than a checkpoint needs
                running.says_again("Staleness stats", START_SECONDS)
            os.kill(running.process("ray::LearnerRank"), number)
            running.says_again("another rollout worker was ready", START_SECONDS)
            engines.append(running.process("sglang::scheduler"))
        running.says_again("Staleness stats", START_SECONDS)
        running.press_ctrl_c()
        code = running.ended(within=2 * PATIENCE_SECONDS)
        return Interrupted(folder, page, engines, code, running.left_running(), running.out, running.err)


def test_a_run_goes_on_after_its_router_actor_and_its_engine_actor_were_killed(interrupted: Interrupted) -> None:
    assert interrupted.err.count("engine routed") == 1
    assert interrupted.out.count("Staleness stats") >= 2
    assert not (interrupted.folder / "runs" / "latest" / "dead_letters.jsonl").exists()


def test_a_lost_learner_is_replaced_and_each_prompt_is_trained_once_by_the_surviving_weights(
    interrupted: Interrupted,
) -> None:
    assert len(set(interrupted.engines)) == 1, "engines are kept"
    audit, trained, restored = Audit(staleness_limit=2), Counter[str](), list[LearnerRestored]()
    last = -1
    for event in read_events(interrupted.folder / "runs" / "latest" / "events.jsonl"):
        audit.observe(event)
        match event:
            case GroupMoved(after="trained", feed_index=prompt):
                trained[prompt] += 1
            case GroupMoved(before="trained" | "published", after="queued", feed_index=prompt):
                trained[prompt] -= 1
            case StepEnded(rollout=rollout):
                assert rollout == last + 1, "no batch was skipped"
                last = rollout
            case LearnerRestored(rollout=last):
                restored.append(event)
            case _:
                pass
    assert audit.violations == []
    assert set(trained.values()) <= {0, 1}
    assert len(restored) == 2
    assert all(event.rollout % 3 == 2 for event in restored), "a checkpoint is written after every third batch"
    assert all(event.version > event.kept_version for event in restored), "no version number is used again"


def test_the_log_names_the_address_of_the_live_page(interrupted: Interrupted) -> None:
    assert interrupted.page["now"]["run"]["rollouts"] == 500


def test_ctrl_c_ends_the_run_after_its_step_and_leaves_nothing_running(interrupted: Interrupted) -> None:
    assert interrupted.code == 130
    assert interrupted.left_running == {}
    assert "stopping: groups in flight" in interrupted.err
    assert "Traceback" not in interrupted.err
    assert "ended      interrupted" in interrupted.out


def test_a_run_that_ctrl_c_ended_has_a_summary_a_report_and_a_checkpoint(interrupted: Interrupted) -> None:
    run = interrupted.folder / "runs" / "latest"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reason"] == "interrupted"
    newest = CheckpointFolder(interrupted.folder / "saved").latest()
    assert newest.rollout == summary["rollouts"] - 1, "saved at the end"
    assert b"interrupted" in (run / "report.html").read_bytes()


def test_a_second_ctrl_c_ends_the_run_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    with job(tmp_path, *LONG) as running:
        running.says("Staleness stats", START_SECONDS)
        running.press_ctrl_c()
        # Two signals at the same moment are one to Python.
        running.complains("stopping: groups in flight", within=PATIENCE_SECONDS)
        running.press_ctrl_c()
        assert running.ended(within=PATIENCE_SECONDS) == 130
        assert running.left_running() == {}
    assert "Traceback" not in running.err
    assert running.alarms == []
    assert json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())["reason"] == "interrupted"


def test_ctrl_c_before_the_start_of_any_process_ends_the_run_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()]))
    with job(tmp_path, *LONG, "--rm-type", "null", "--custom-rm-path", "slow_to_import.grade") as running:
        running.says("importing", START_SECONDS)
        running.press_ctrl_c()
        assert running.ended(within=PATIENCE_SECONDS) == -signal.SIGINT
        assert running.left_running() == {}
    assert running.err == ""


def test_engines_and_workers_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, *LONG) as running:
        running.runs(ENGINE_MODULE, START_SECONDS)
        running.kill()
        left = running.left_running(patience=PATIENCE_SECONDS)
    assert left == {}
