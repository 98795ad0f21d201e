"""Ctrl-C finishes the step and leaves no process; a second one ends the run; a killed driver leaves no engine."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from urllib.request import urlopen

import pytest

from miles_async.adapters.sglang.launch import ENGINE_MODULE
from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from tests.stack.job import job
from tests.waiting import PATIENCE_SECONDS

LONG = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")
START_SECONDS = 280


def test_ctrl_c_ends_the_run_after_its_step_with_a_summary_and_leaves_nothing_running(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with job(tmp_path, *LONG, "--save", str(saved)) as running:
        running.says("Staleness stats", START_SECONDS)
        address = re.search(r"page=(http://127\.0\.0\.1:\d+/)", running.err)
        assert address is not None, running.err
        with urlopen(f"{address[1]}state.json", timeout=PATIENCE_SECONDS) as state:
            assert json.load(state)["now"]["run"]["rollouts"] == 500
        running.press_ctrl_c()
        assert running.ended(within=PATIENCE_SECONDS) == 130
        assert running.left_running() == {}
    assert "stopping after this step" in running.err
    assert "Traceback" not in running.err
    assert "ended      interrupted" in running.out
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    assert summary["reason"] == "interrupted"
    assert summary["rollouts"] >= 1
    assert summary["versions"] == summary["rollouts"], "what was trained was still published"
    newest = CheckpointFolder(saved).latest().checkpoint
    assert read_progress(newest)["rollout"] == summary["rollouts"] - 1, "saved at the end"
    assert b"interrupted" in (tmp_path / "runs" / "latest" / "report.html").read_bytes()


def test_a_second_ctrl_c_ends_the_run_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    with job(tmp_path, *LONG) as running:
        running.says("Staleness stats", START_SECONDS)
        running.press_ctrl_c()
        # Two signals at the same moment are one to Python.
        running.complains("stopping after this step", within=PATIENCE_SECONDS)
        running.press_ctrl_c()
        assert running.ended(within=PATIENCE_SECONDS) == 130
        assert running.left_running() == {}
    assert "Traceback" not in running.err
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
