"""The report of a run, made from its run folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from miles_async.events import (
    ClusterReady,
    Event,
    QueueChanged,
    RunEnded,
    RunStarted,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
    encode,
)
from miles_async.observability.page.report import main


def run(folder: Path, *, reward: float = 0.5, limit: int = 2, steps: int = 3) -> Path:
    """A folder as a run leaves it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"rollout: {{max_weight_staleness: {limit}, rollout_stop: []}}\n")
    events: list[Event] = [
        RunStarted(
            time=100.0,
            run=folder.name,
            entry="train_async.py",
            rollouts=steps,
            groups_per_rollout=4,
            samples_per_group=2,
            queue_capacity=1000,
            window=3,
            slots=8,
            in_flight=8,
            longest_response=16,
            model="tiny",
            configuration="one",
            staleness_limit=limit,
        ),
        ClusterReady(time=110.0, weight_transfer="p2p", warm_start_seconds=1.0, warm_start_cached=True),
        TrainerPhaseChanged(time=110.0, to="batch"),
    ]
    for step in range(steps):
        begun = 111.0 + 2 * step
        events += [
            QueueChanged(time=begun, depth=step, blocked=0),
            StepStarted(time=begun, rollout=step, version=step, staleness=[0, 1, 1, 2], groups=[0, 1, 2, 3]),
            StepEnded(
                time=begun + 1,
                rollout=step,
                seconds=1.0,
                tokens=64,
                finite=True,
                reward=reward,
                response_length=3.0,
                metrics={"loss": 0.1},
            ),
        ]
    events.append(RunEnded(time=110.0 + 2 * steps + 1, reason="done"))
    (folder / "events.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in events))
    return folder


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="state">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    values: dict[str, Any] = json.loads(found[1])
    return values


def test_a_report_holds_figures_plots_configuration_and_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "one")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    [shown] = data_of(folder / "report.html")["runs"]
    assert (shown["summary"]["rollouts"], shown["summary"]["reason"]) == (3, "done")
    assert shown["config"] == {"rollout.max_weight_staleness": 2, "rollout.rollout_stop": []}
    assert shown["state"]["now"]["staleness_limit"] == 2
    assert [value for value in shown["state"]["figures"]["series"]["reward"]["mean"] if value is not None] == [0.5] * 3
    seconds = shown["summary"]["verdict_seconds"]
    assert [phase[2] for phase in shown["phases"]] == list(seconds) == ["rollout-bound", "balanced"]
    assert sum(seconds.values()) == 7.0


def test_one_report_can_compare_two_runs(tmp_path: Path) -> None:
    one, other = run(tmp_path / "one"), run(tmp_path / "other", reward=0.75, limit=4)
    assert main([str(one), "--with", str(other)]) == 0
    runs = data_of(one / "report-with-other.html")["runs"]
    assert [shown["name"] for shown in runs] == ["one", "other"]
    assert [shown["summary"]["reward_last"] for shown in runs] == [0.5, 0.75]
    assert [shown["config"]["rollout.max_weight_staleness"] for shown in runs] == [2, 4]


def test_a_run_that_was_killed_has_a_report_too(tmp_path: Path) -> None:
    folder = run(tmp_path / "one")
    content = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(content[: content.rindex(b"RunEnded")])
    assert main([str(folder)]) == 0
    [shown] = data_of(folder / "report.html")["runs"]
    assert (shown["state"]["now"]["ended"], shown["summary"]["rollouts"]) == (None, 3)


def test_a_longer_run_makes_no_larger_report(tmp_path: Path) -> None:
    sizes = []
    for steps in (250, 1000):
        folder = run(tmp_path / str(steps), steps=steps)
        main([str(folder)])
        sizes.append((folder / "report.html").stat().st_size)
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (lambda folder: (folder / "config.yaml").unlink(), "is not a run folder (No such file or directory"),
        (lambda folder: (folder / "events.jsonl").write_bytes(b""), "is empty: wait until the run has started"),
        (lambda folder: (folder / "events.jsonl").write_bytes(b"{}\n"), "line 1: not an event"),
        (lambda folder: (folder / "report.html").mkdir(), "cannot be written (Is a directory): name another file"),
    ],
)
def test_a_folder_that_cannot_be_read_or_written_is_a_user_error(
    spoil: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "one")
    spoil(folder)
    assert main([str(folder)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("report: ")
    assert sentence in complaint
    assert complaint.count("\n") == 1
