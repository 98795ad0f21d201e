"""Engines and learner that share devices on the real stack. Without CUDA neither has device memory to release."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_check import job
from benchmarks.gpu_check.report import Report
from miles_async.events import EngineChanged
from tests.stack.conftest import Stack


def test_colocated_engines_resume_with_the_right_weights_and_cache(stack: Stack, tmp_path: Path) -> None:
    run = stack.play("train.py", *job.COLOCATED)
    job.judge(Report("job", tmp_path / "job.jsonl"), "run", run.events, "fp32")
    rows = [json.loads(line)["row"] for line in (tmp_path / "job.jsonl").read_text().splitlines()]
    assert {row["part"]: row["status"] for row in rows} == {
        "run: optimizer steps": "pass",
        "run: engine against learner": "pass",
        "run: longest pause of a publish": "pass",
    }
    assert run.of(EngineChanged) == run.of(EngineChanged)[:1], "no engine was lost on the way"
