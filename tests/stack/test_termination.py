"""SIGTERM ends the run as Ctrl-C does, and so does the loss of Ray's head node, with a sentence; nothing is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_async.adapters.storage.checkpoints import CheckpointFolder, read_progress
from tests.stack.job import job
from tests.waiting import PATIENCE_SECONDS, START_SECONDS

LONG = ("--warm-start-max-steps", "0", "--eval-size", "0", "--num-rollout", "500")


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to the driver", "to its process group"])
def test_sigterm_ends_the_run_with_summary_report_and_checkpoint_and_leaves_nothing_running(
    tmp_path: Path, send: Callable[[int, int], None]
) -> None:
    saved = tmp_path / "saved"
    patient = ("--termination-grace-seconds", str(PATIENCE_SECONDS))
    with job(tmp_path, *LONG, *patient, "--save", str(saved)) as running:
        running.says("Staleness stats", START_SECONDS)
        send(running.pid, signal.SIGTERM)
        assert running.ended(within=2 * PATIENCE_SECONDS) == 128 + signal.SIGTERM
        assert running.left_running() == {}
    assert "stopping after this step; send SIGTERM again" in running.err
    assert "*** SIGTERM received" not in running.err, "native code printed its stack"
    assert "Traceback" not in running.err
    assert "ended      interrupted" in running.out
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    assert summary["reason"] == "interrupted"
    assert summary["versions"] == summary["rollouts"]
    newest = CheckpointFolder(saved).latest().checkpoint
    assert read_progress(newest)["rollout"] == summary["rollouts"] - 1
    assert b"interrupted" in (tmp_path / "runs" / "latest" / "report.html").read_bytes()


def test_a_run_that_loses_the_ray_head_node_ends_with_an_error_message_and_a_summary(tmp_path: Path) -> None:
    with job(tmp_path, *LONG) as running:
        running.says("Staleness stats", START_SECONDS)
        os.kill(running.process("gcs_server"), signal.SIGKILL)
        assert running.ended(within=PATIENCE_SECONDS) == 1
        assert running.left_running() == {}
    assert "train_async.py: the head node of Ray at " in running.err
    assert "Traceback" not in running.err
    assert "has not answered" in json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())["reason"]
