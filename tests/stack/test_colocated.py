"""Engines and learner that share devices on the real stack. Without CUDA neither has device memory to release."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_check import job
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import Surroundings
from miles_async.events import EngineChanged, StartupChanged


def test_a_colocated_engine_starts_before_the_learner_and_resumes_with_the_right_weights_and_cache(
    tmp_path: Path,
) -> None:
    surroundings = Surroundings(folder=tmp_path, models=tmp_path / "models")
    events = job.play(surroundings, "train.py", *job.COLOCATED, precision="fp32")
    job.judge(Report("job", tmp_path / "job.jsonl"), "run", events, "fp32")
    rows = [json.loads(line)["row"] for line in (tmp_path / "job.jsonl").read_text().splitlines()]
    assert {row["part"]: row["status"] for row in rows} == {
        "run: optimizer steps": "pass",
        "run: engine against learner": "pass",
        "run: longest pause of a publish": "pass",
    }
    starts = [event for event in events if isinstance(event, StartupChanged) and event.part in ("engine-0", "learner")]
    assert [(event.part, event.seconds is None) for event in starts] == [
        ("engine-0", True),
        ("engine-0", False),
        ("learner", True),
        ("learner", False),
    ]
    # SGLang ends if it is asked to release memory that it has not allocated, or the other way round.
    changes = [event for event in events if isinstance(event, EngineChanged)]
    assert [event.state for event in changes] == ["routed"], "no engine was lost on the way"
