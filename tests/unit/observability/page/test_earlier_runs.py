"""Earlier runs of the same configuration, as page and report show them."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from miles_async.events import StepEnded, StepStarted, encode
from miles_async.observability.page.document import LivePage
from miles_async.observability.page.earlier import MAX_RUNS, EarlierRun, comparison, configuration_id, earlier_runs
from miles_async.observability.page.report import RunData
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.view import RunView
from tests.configuration import run_config
from tests.unit.example_events import RUN

THIS = replace(RUN, run="this", time=1000.0, configuration="c1")


def ended(parent: Path, name: str, *, started: float = 500.0, zone: str = "+00:00", **figures: Any) -> Path:
    """A folder with the summary of a run that ended."""
    folder = parent / name
    folder.mkdir()
    summary = {
        "run": name,
        "configuration": "c1",
        "started": datetime.fromtimestamp(started, UTC).replace(tzinfo=None).isoformat() + zone,
        "reason": "done",
        "rollouts": 3,
        "wall_seconds": 60.0,
        "groups_per_second": 2.0,
        "accuracy_before": 0.2,
        "accuracy_before_interval": [0.1, 0.3],
        "accuracy_after": 0.6,
        "accuracy_after_interval": [0.5, 0.7],
        "batches_per_reward": 1,
        "rewards": [0.1, 0.2, 0.3],
        "a figure of a later version": None,
    }
    (folder / "summary.json").write_text(json.dumps(summary | figures))
    return folder


def read(parent: Path, name: str, **figures: Any) -> EarlierRun:
    folder = ended(parent, name, **figures)
    [run] = [run for run in earlier_runs(THIS, folder.with_name("this")) if run.run == name]
    return run


def test_earlier_runs_of_the_same_configuration_are_found_newest_first(tmp_path: Path) -> None:
    this = ended(tmp_path, "this", started=1000.0)
    ended(tmp_path, "old", started=100.0)
    ended(tmp_path, "new", started=900.0)
    ended(tmp_path, "other", configuration="c2")
    ended(tmp_path, "later", started=1100.0)
    ended(tmp_path, "without a batch", rollouts=0)
    (tmp_path / "latest").symlink_to("new")
    assert [run.run for run in earlier_runs(THIS, this)] == ["new", "old"]


def test_damaged_and_foreign_folders_are_skipped(tmp_path: Path) -> None:
    this = ended(tmp_path, "this", started=1000.0)
    ended(tmp_path, "good")
    for name, content in {
        "empty": b"",
        "cut": b'{"run": "cu',
        "list": b"[1]",
        "binary": b"\xff\x00",
        "foreign": b'{"run": "foreign"}',
        "large": b" " * (2 << 20),
        "nested": b'{"x":' + b"[" * 500_000,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_bytes(content)
    ended(tmp_path, "a text as its reward", rewards=["high"])
    ended(tmp_path, "no batch per reward", batches_per_reward=0)
    ended(tmp_path, "no time zone", zone="")
    (tmp_path / "running").mkdir()
    (tmp_path / "a folder as its summary" / "summary.json").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "summary.json")
    (tmp_path / "file").write_text("")
    assert [run.run for run in earlier_runs(THIS, this)] == ["good"]


def test_a_run_whose_folder_is_gone_has_no_earlier_runs(tmp_path: Path) -> None:
    assert earlier_runs(THIS, tmp_path / "missing" / "this") == []


def test_only_the_newest_earlier_runs_are_compared(tmp_path: Path) -> None:
    for number in range(MAX_RUNS + 5):
        ended(tmp_path, f"run-{number}", started=100.0 + number)
    found = earlier_runs(THIS, tmp_path / "this")
    assert [run.run for run in found] == [f"run-{number}" for number in range(MAX_RUNS + 4, 4, -1)]


def test_the_comparison_has_the_spread_of_the_figures_that_are_known(tmp_path: Path) -> None:
    runs = [
        read(tmp_path, "a", accuracy_after=0.5, groups_per_second=None),
        read(tmp_path, "b", accuracy_after=0.8, groups_per_second=None),
        read(tmp_path, "c", accuracy_after=None, groups_per_second=None),
    ]
    shown = comparison(runs)
    assert shown is not None
    assert shown["spread"]["accuracy_after"] == [0.5, 0.65, 0.8]
    assert shown["spread"]["wall_seconds"] == [60.0, 60.0, 60.0]
    assert "groups_per_second" not in shown["spread"]
    assert [row["run"] for row in shown["runs"]] == ["a", "b", "c"]
    assert "rewards" not in shown["runs"][0]


def test_the_band_covers_at_each_batch_the_runs_that_trained_it(tmp_path: Path) -> None:
    runs = [
        read(tmp_path, "a", rewards=[0.1, 0.2, 0.3]),
        read(tmp_path, "b", rewards=[0.5, None]),
        read(tmp_path, "c", rewards=[0.2, 0.8]),
    ]
    shown = comparison(runs)
    assert shown is not None
    band = {"low": [0.1, 0.2, 0.3], "mean": [0.2, 0.5, 0.3], "high": [0.5, 0.8, 0.3]}
    assert shown["figures"] == {"start": 0, "width": 1, "series": {"earlier": band}}


def test_the_rewards_of_a_shorter_run_are_averaged_as_those_of_the_longest_one(tmp_path: Path) -> None:
    runs = [
        read(tmp_path, "long", batches_per_reward=2, rewards=[0.4, 0.6]),
        read(tmp_path, "short", rewards=[0.1, 0.3, 0.8]),
    ]
    shown = comparison(runs)
    assert shown is not None
    assert shown["figures"]["width"] == 2
    assert shown["figures"]["series"]["earlier"]["low"] == pytest.approx([0.2, 0.6])


def test_seeds_and_names_do_not_change_the_configuration_but_other_settings_do() -> None:
    def of(entry: str = "train_async.py", **settings: Any) -> str:
        return configuration_id(run_config(**settings), entry)

    same: list[dict[str, Any]] = [
        {},
        {"rollout_seed": 7},
        {"seed": 8},
        {"run_dir": "x"},
        {"experiment_name": "x"},
        {"save": "x"},
    ]
    assert len({of(**settings) for settings in same}) == 1
    different: list[dict[str, Any]] = [{}, {"lr": 0.5}, {"num_rollout": 7}, {"reasoning_gym_task": "chain_sum"}]
    assert len({of(**settings) for settings in different} | {of("train.py")}) == len(different) + 1


def observed() -> RunView:
    view = RunView()
    view.apply(THIS)
    for rollout, reward in enumerate((0.3, 0.4)):
        time = 1010.0 + rollout
        view.apply(StepStarted(time=time, rollout=rollout, version=rollout, staleness=[0], groups=[rollout]))
        view.apply(step_ended(time + 0.5, rollout, reward))
    return view


def step_ended(time: float, rollout: int, reward: float) -> StepEnded:
    return StepEnded(
        time=time, rollout=rollout, seconds=0.5, tokens=8, finite=True, reward=reward, response_length=2.0, metrics={}
    )


def test_the_live_page_embeds_the_earlier_runs_and_its_state_has_the_rewards_of_this_run(tmp_path: Path) -> None:
    ended(tmp_path, "old")
    page = LivePage(observed(), tmp_path / "this")
    assert b'"run":"old"' in page.html(1020.0)
    assert json.loads(page.state("whole", 1020.0))["rewards"]["series"]["reward"]["mean"] == [0.3, 0.4]


def test_a_report_compares_with_the_runs_before_it_and_with_none_if_there_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "this"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}\n")
    (folder / "events.jsonl").write_bytes(
        b"".join(encode(event) + b"\n" for event in (THIS, step_ended(1010.0, 0, 0.3)))
    )
    assert RunData.read(RunFolder(folder)).values()["earlier"] is None
    ended(tmp_path, "old")
    ended(tmp_path, "later", started=2000.0)
    earlier = RunData.read(RunFolder(folder)).values()["earlier"]
    assert [row["run"] for row in earlier["runs"]] == ["old"]
