"""The table of `make gpu-check`: checks that fail, crash, hang or are not possible do not stop the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_check.report import NotPossibleError, Report, Row, run_check, table


def run(folder: Path, script: str, *, limit: float = 30.0) -> list[Row]:
    return run_check("publish", ["sh", "-c", script], folder, {"RESULTS": str(folder / "publish.jsonl")}, limit)


def wrote(*lines: object) -> str:
    return "; ".join(f"echo '{json.dumps(line)}' >>$RESULTS" for line in lines)


BANDWIDTH = {"row": {"check": "publish", "part": "disk", "status": "pass", "value": 2.0, "unit": "GB/s"}}


def reported(folder: Path, report: Report) -> list[Row]:
    lines = (folder / "report.jsonl").read_text().splitlines()
    return [Row(**json.loads(line)["row"]) for line in lines if "row" in line]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("learner", tmp_path / "report.jsonl")


def test_a_part_that_raises_does_not_stop_the_parts_after_it(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with report.part("bf16"):
        raise RuntimeError("CUDA error: an illegal memory access\nand more")
    with report.part("Transformer Engine"):
        raise NotPossibleError("transformer_engine is not installed")
    with report.part("float32"):
        report.figure("float32", 0.5, "nats", at_most=1.0)
    assert [(row.part, row.status, row.reason) for row in reported(tmp_path, report)] == [
        ("bf16", "fail", "RuntimeError: CUDA error: an illegal memory access"),
        ("Transformer Engine", "not possible here", "transformer_engine is not installed"),
        ("float32", "pass", ""),
    ]
    assert "Traceback" in capsys.readouterr().err


def test_a_version_that_lacks_a_name_makes_its_part_impossible(report: Report, tmp_path: Path) -> None:
    with report.part("sglang"):
        raise ImportError("cannot import name 'WeightUpdater' from 'sglang.srt'", name="sglang.srt")
    with report.part("a mistake of this project"):
        raise ImportError("cannot import name 'learner'", name="miles_async.adapters")
    assert [row.status for row in reported(tmp_path, report)] == ["not possible here", "fail"]


@pytest.mark.parametrize(
    "value, limits, status",
    [
        (0.009, {"at_most": 0.01}, "pass"),
        (0.011, {"at_most": 0.01}, "fail"),
        (3.0, {"at_least": 4.0}, "fail"),
        (float("nan"), {}, "fail"),
        (float("inf"), {"at_most": 0.01}, "fail"),
        (3.0, {}, "pass"),
    ],
)
def test_a_figure_passes_within_its_limits(
    report: Report, tmp_path: Path, value: float, limits: dict[str, float], status: str
) -> None:
    report.figure("gap", value, "nats", **limits)
    [row] = reported(tmp_path, report)
    assert row.status == status


def test_the_results_before_a_crash_are_kept(tmp_path: Path) -> None:
    script = wrote({"begun": "disk"}, BANDWIDTH, {"ended": "disk"}, {"begun": "p2p"})
    rows = run(tmp_path, f"{script}; echo 'RuntimeError: no RDMA device' >&2; kill -SEGV $$")
    assert [(row.part, row.status) for row in rows] == [("disk", "pass"), ("p2p", "fail")]
    assert rows[1].reason.startswith("it ended with the signal SIGSEGV; its last error: RuntimeError: no RDMA device")


def test_a_check_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    [row] = run(tmp_path, "sleep 600; true", limit=0.01)
    assert (row.status, row.reason) == ("fail", "it had not ended after 0.01 s")


def test_a_check_that_reports_nothing_has_failed(tmp_path: Path) -> None:
    [row] = run(tmp_path, "true")
    assert (row.part, row.status) == ("start", "fail")


def test_the_table_shows_each_figure_beside_the_cpus() -> None:
    rows = [
        Row(check="publish", part="disk", status="pass", value=12.34, unit="GB/s", limit=">= 1"),
        Row(check="publish", part="broadcast", status="not possible here", reason="NCCL needs two GPUs"),
    ]
    assert table(rows, {("publish", "disk"): 0.5}).splitlines() == [
        "check    part       result             figure     must be  on a CPU",
        "publish  disk       pass               12.3 GB/s  >= 1     0.5 GB/s",
        "publish  broadcast  not possible here",
        "    NCCL needs two GPUs",
    ]
