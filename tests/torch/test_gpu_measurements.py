"""What the checks of `make gpu-check` measure, as far as a CPU shows it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import gae, measure
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.surroundings import Surroundings


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("check", tmp_path / "check.jsonl")


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], dict[str, dict[str, Any]]]:
    """The rows that were reported, by part."""

    def read() -> dict[str, dict[str, Any]]:
        lines = map(json.loads, (tmp_path / "check.jsonl").read_text().splitlines())
        return {line["row"]["part"]: line["row"] for line in lines if "row" in line}

    return read


def test_the_operators_of_a_call_are_counted_and_printed(
    report: Report, rows: Callable[[], dict[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    ones = torch.ones(8)
    measure.report_kernels(report, "sum", lambda: ones.neg().neg().neg())
    assert rows()["sum: kernels"]["value"] == 3
    assert "3 aten::neg" in capsys.readouterr().out


def test_the_time_of_an_operator_is_without_those_inside_it() -> None:
    def event(name: str, tid: int, ts: float, dur: float) -> dict[str, Any]:
        return {"name": name, "tid": tid, "ts": ts, "dur": dur}

    events = [event("linear", 1, 0, 10), event("mm", 1, 2, 5), event("launch", 1, 3, 1), event("add", 2, 3, 4)]
    assert measure.own_times(events) == [("linear", 5), ("mm", 4), ("launch", 1), ("add", 4)]


def test_the_first_call_is_not_measured(report: Report, rows: Callable[[], dict[str, dict[str, Any]]]) -> None:
    calls: list[None] = []
    measure.report_cost(report, "step", lambda: calls.append(None))
    assert len(calls) == 1 + measure.ROUNDS
    assert {part: row["status"] for part, row in rows().items()} == {
        "step: time": "pass",
        "step: memory": "not possible here",
        "step: synchronizations": "not possible here",
    }


def test_waits_for_the_gpu_are_counted_by_line(
    report: Report,
    rows: Callable[[], dict[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(measure, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another warning", stacklevel=1)

    measure.report_synchronizations(report, "step", step)
    assert (rows()["step"]["value"], modes) == (2, ["warn", "default"])
    assert "step: 2 at " in capsys.readouterr().out


def test_advantages_are_compared_with_a_recursion_over_tokens(
    report: Report, rows: Callable[[], dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    gae.check(report, Surroundings(folder=tmp_path, models=tmp_path))
    found = rows()
    assert [found[f"{part}: advantages"]["status"] for part in gae.BATCHES] == ["pass", "pass"]


def test_wrong_advantages_fail(
    report: Report,
    rows: Callable[[], dict[str, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def undiscounted(rewards: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return rewards - values, None

    monkeypatch.setattr(gae, "generalized_advantages", undiscounted)
    gae.check(report, Surroundings(folder=tmp_path, models=tmp_path))
    assert rows()["one response: advantages"]["status"] == "fail"
