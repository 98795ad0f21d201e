"""What a run shows and leaves behind: lines, progress bar, summary, trace, run folder, log."""

from __future__ import annotations

import io
import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import structlog
from msgspec import structs
from msgspec.structs import replace

from miles_async.adapters.system.network_ports import free_port
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.events import (
    BatchDrained,
    ClusterReady,
    DataSkipped,
    EngineBusy,
    Evaluated,
    Event,
    EventsReceived,
    GroupMoved,
    LearnerRestored,
    PublishEnded,
    RouterChanged,
    RunEnded,
    SampleDisplayed,
    Stalled,
    StepEnded,
    StepStarted,
)
from miles_async.observability import http_server, run_folder
from miles_async.observability import subscribers as subscribers_of_run
from miles_async.observability.console.logging import configure_logging
from miles_async.observability.console.program_lines import PlainLines
from miles_async.observability.console.terminal import ProgressBar
from miles_async.observability.metrics.scrape_targets import ScrapeTargets
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.state.charts import MAX_BATCHES
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.summary import summarize, summary_text, write_summary
from miles_async.observability.trace import event_log
from miles_async.observability.trace.event_log import read_events
from miles_async.observability.view import RunView
from tests.configuration import build, read_yaml, run_config
from tests.unit import example_events
from tests.waiting import PATIENCE_SECONDS
from workers.driver import REFUSED, drive


@pytest.fixture(autouse=True)
def servers_close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STOP_CHECK_SECONDS", 0.005)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(rollout: int, started: float, ended: float, staleness: list[int], *, finite: bool = True) -> list[Event]:
    return [
        StepStarted(time=started, rollout=rollout, version=rollout, staleness=staleness, groups=[0] * len(staleness)),
        StepEnded(
            time=ended,
            rollout=rollout,
            seconds=ended - started,
            tokens=600,
            finite=finite,
            reward=0.25 + rollout / 4,
            response_length=4.0,
            metrics={},
        ),
    ]


def published(version: int, staged: float, paused: float, *, live: bool = True) -> PublishEnded:
    return PublishEnded(
        time=115.0,
        version=version,
        live=live,
        staged_seconds=staged,
        paused_seconds=paused,
        stopping_seconds=0.0,
        write_seconds=paused / 2,
        resuming_seconds=0.0,
        bytes=10,
        queue=0,
        fenced=[],
    )


def dropped(reason: str) -> GroupMoved:
    return GroupMoved(
        time=112.0,
        sequence=1,
        feed_index="sample_0_1",
        attempt=0,
        before="queued",
        after="dropped",
        reason=reason,
        counts={},
    )


def evaluated(rollout: int, accuracy: float) -> Evaluated:
    return Evaluated(
        time=101.0,
        name="heldout",
        rollout=rollout,
        accuracy=accuracy,
        reward=accuracy,
        problems=512,
        seconds=1,
        truncated=0,
        versions=(3, 4),
    )


RUN = structs.replace(example_events.RUN, rollouts=2)
READY = ClusterReady(time=101.0, weight_transfer="p2p", warm_start_seconds=7.0, warm_start_cached=False)
# Two steps of 4 and 2 seconds in a training phase of 10; engines busy for 9 of these 10 seconds.
WHOLE_RUN: list[Event] = [
    RUN,
    READY,
    evaluated(-1, 0.2),
    EngineBusy(time=110.0, busy=5.0, in_flight=2),
    *step(0, 110.0, 114.0, [0, 1]),
    published(0, 9.0, 9.0),
    published(1, 0.01, 0.02),
    dropped("stale"),
    dropped("filtered"),
    *step(1, 118.0, 120.0, [1, 3]),
    published(2, 0.01, 0.04),
    published(3, 9.0, 9.0, live=False),
    EngineBusy(time=120.0, busy=14.0, in_flight=0),
    evaluated(2, 0.6),
    RunEnded(time=130.0, reason="done"),
]


def lines_of(*events: Event) -> list[str]:
    stream = io.StringIO()
    lines = PlainLines(stream)
    for event in events:
        lines.observe(event)
    return stream.getvalue().splitlines()


def view_of(events: list[Event]) -> RunView:
    view = RunView()
    for event in events:
        view.apply(event)
    return view


def drained(recycled: int) -> BatchDrained:
    return BatchDrained(time=1.0, rollout=0, depth=17, waited=0.1, recycled=recycled)


def test_a_drain_prints_queue_size_and_staleness_of_its_groups() -> None:
    assert lines_of(drained(3), StepStarted(time=2.0, rollout=0, version=4, staleness=[0, 1, 3], groups=[5, 6, 7])) == [
        "Global worker queue size: 17",
        "Staleness stats: recycled=3, avg_staleness=1.33, max_staleness=3",
    ]


def test_recycled_groups_are_counted_since_the_last_staleness_line() -> None:
    first, second = step(0, 1.0, 2.0, [0])[0], step(1, 3.0, 4.0, [0])[0]
    printed = lines_of(drained(3), drained(2), first, drained(1), second)
    assert [line for line in printed if line.startswith("Staleness")] == [
        "Staleness stats: recycled=5, avg_staleness=0.00, max_staleness=0",
        "Staleness stats: recycled=1, avg_staleness=0.00, max_staleness=0",
    ]


def displayed(response: str, reward: float) -> SampleDisplayed:
    return SampleDisplayed(
        time=1.0,
        sequence=0,
        feed_index="sample_0_0",
        prompt="1+1=",
        response=response,
        label="2",
        reward=reward,
        rewards=[reward],
        tokens=1,
        versions=(0, 0),
        truncated=False,
    )


def test_the_first_and_the_last_sample_of_a_rollout_are_printed_as_in_slime() -> None:
    printed = lines_of(displayed("3\n", 0.0), displayed("2", 1.0), drained(0), drained(0), displayed("4", 0.0))
    assert [line for line in printed if "rollout" in line] == [
        r"First rollout sample: ['1+1=3\n'], label: 2, reward: 0.0",
        "Finish rollout: ['1+1=2'], label: 2, reward: 1.0",
        "First rollout sample: ['1+1=4'], label: 2, reward: 0.0",
    ]


def test_devices_saved_batches_and_evaluations_are_printed_as_in_slime() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream, devices=16, saved="debug/{rollout_id}.st")
    scores = structs.replace(evaluated(0, 0.5), truncated=0.75)
    for event in (WHOLE_RUN[0], step(0, 1.0, 2.0, [0])[0], scores):
        lines.observe(event)
    assert stream.getvalue().splitlines() == [
        "Creating placement group with 16 devices...",
        "Save debug rollout data to debug/0.st",
        "Staleness stats: recycled=0, avg_staleness=0.00, max_staleness=0",
        "eval 0: {'eval/heldout': 0.5, 'eval/heldout-truncated_ratio': 0.75}",
    ]


def test_a_stall_prints_the_warning() -> None:
    assert lines_of(Stalled(time=1.0, seconds=30.2, queue=0, collected=5, wanted=32)) == [
        "Warning: No progress for 30s. Queue size: 0, Collected: 5/32"
    ]


@pytest.mark.parametrize("stream, enabled", [(io.StringIO(), True), (Terminal(), False)])
def test_the_bar_is_not_shown_without_a_terminal_or_if_disabled(stream: io.StringIO, enabled: bool) -> None:
    bar = ProgressBar(stream, enabled=enabled)
    for event in WHOLE_RUN:
        bar.observe(event)
    bar.close()
    assert stream.getvalue() == ""


def test_the_summary_covers_the_whole_run_and_the_training_phase() -> None:
    figures = summarize(view_of(WHOLE_RUN))
    assert figures["accuracy_before"] == 0.2
    assert figures["accuracy_after"] == 0.6
    assert figures["wall_seconds"] == 30
    assert figures["training_seconds"] == 10
    assert figures["groups_per_second"] == 0.4
    assert figures["tokens_per_second"] == 120
    assert figures["learner_idle_share"] == pytest.approx(0.4)
    assert figures["engine_idle_share"] == pytest.approx(0.1)
    assert figures["rollouts"] == 2
    assert figures["reason"] == "done"


def test_batches_that_a_lost_learner_undid_do_not_count_in_the_summary() -> None:
    steps = [event for event in WHOLE_RUN if isinstance(event, StepEnded)]
    restored = LearnerRestored(time=12.0, rollout=steps[0].rollout, kept_version=1, version=3, updates=0, groups=2)
    assert summarize(view_of([*steps, restored]))["rollouts"] == 1
    assert summarize(view_of([*steps, restored, steps[1]]))["rollouts"] == 2


def test_the_summary_has_the_confidence_intervals_of_the_accuracies() -> None:
    figures: Mapping[str, Any] = summarize(view_of(WHOLE_RUN))
    for name in ("accuracy_before", "accuracy_after"):
        low, high = figures[f"{name}_interval"]
        assert 0 < low < figures[name] < high < 1
    assert summarize(view_of([RUN]))["accuracy_after_interval"] is None


def test_the_summary_names_the_samples_of_the_last_evaluation_that_have_no_score() -> None:
    view = view_of([RUN, evaluated(-1, 0.2), structs.replace(evaluated(9, 0.4), missing=3)])
    assert summarize(view)["scores"]["eval/heldout-missing_samples"] == 3
    text = summary_text(view)
    assert "0.200 before, 0.400 after (95 %: 0.168 to 0.237 of 512 samples, 0.358 to 0.443 of 512 samples)" in text
    assert "; 3 samples without a score are left out" in text


@pytest.mark.parametrize(
    "correct, problems, low, high",
    [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0), (64, 128, 0.4147, 0.5853)],
)
def test_the_interval_of_an_accuracy_is_that_of_wilson(correct: int, problems: int, low: float, high: float) -> None:
    evaluated = Evaluated(
        time=0.0,
        name="held_out",
        rollout=0,
        accuracy=correct / problems,
        reward=0.0,
        problems=problems,
        seconds=1.0,
        truncated=0.0,
        versions=(0, 0),
    )
    assert evaluated.interval == pytest.approx((low, high), abs=1e-4)


def test_the_summary_lists_the_reward_of_each_batch_or_of_several_batches_of_a_long_run() -> None:
    assert summarize(view_of(WHOLE_RUN))["rewards"] == [0.25, 0.5]
    long = [RUN, *(event for i in range(2 * MAX_BATCHES) for event in step(i, 110.0 + i, 110.5 + i, [0]))]
    figures = summarize(view_of(long))
    assert figures["batches_per_reward"] == 2
    assert len(figures["rewards"]) == MAX_BATCHES
    assert figures["rewards"][:3] == [0.375, 0.875, 1.375]


def test_the_summary_counts_versions_staleness_and_drops() -> None:
    figures = summarize(view_of(WHOLE_RUN))
    assert figures["versions"] == 2
    assert figures["weight_transfer"] == "p2p"
    assert figures["warm_start_seconds"] == 7.0
    assert figures["publish_ms_median"] == pytest.approx(40)
    assert figures["publish_ms_max"] == pytest.approx(50)
    assert figures["pause_ms_max"] == pytest.approx(40)
    assert figures["staleness_histogram"] == {"0": 1, "1": 2, "3": 1}
    assert figures["staleness_max"] == 3
    assert figures["recycled"] == 1
    assert figures["dropped"] == {"filtered": 1, "stale": 1}


def test_the_summary_has_the_wasted_tokens_by_reason_and_a_bound_for_those_that_a_rollout_worker_lost() -> None:
    events = [
        replace(RUN, longest_response=100),
        replace(dropped("stale"), discarded_tokens=30),
        replace(dropped("stale"), discarded_tokens=40),
        dropped("partial"),
        replace(dropped("worker_lost"), before="in_flight"),
        replace(dropped("worker_lost"), before="fed"),
    ]
    figures = summarize(view_of(events))
    assert figures["wasted_tokens"] == {"stale": 70}
    assert figures["wasted_mainly"] == "groups were too old"
    assert "--max-weight-staleness" in str(figures["wasted_knob"])
    assert figures["lost_tokens_at_most"] == 200, "two samples of one group"
    text = summary_text(view_of(events))
    assert "100.0% of 70 response tokens; stale: 70; mainly because groups were too old" in text


def test_groups_of_a_step_that_was_not_finite_do_not_count_as_trained() -> None:
    figures = summarize(view_of([RUN, *step(0, 110.0, 112.0, [5, 5], finite=False), *step(1, 112.0, 114.0, [1])]))
    assert figures["staleness_histogram"] == {"1": 1}
    assert figures["groups_per_second"] == 0.25


def test_engine_busy_seconds_are_the_difference_between_two_reports() -> None:
    events = [RUN, *step(0, 110.0, 120.0, [0]), EngineBusy(time=130.0, busy=15.0, in_flight=1)]
    assert summarize(view_of(events))["engine_idle_share"] == pytest.approx(0.5)


def test_a_run_without_a_completed_step_has_a_summary(tmp_path: Path) -> None:
    view = view_of([RUN, RunEnded(time=103.0, reason="the engine died at start")])
    write_summary(view, tmp_path / "summary.json")
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["wall_seconds"] == 3
    assert figures["accuracy_after"] is None
    assert figures["groups_per_second"] is None
    assert "the engine died at start" in summary_text(view)


def test_the_summary_file_holds_exactly_the_figures_and_the_text_shows_them(tmp_path: Path) -> None:
    view = view_of(WHOLE_RUN)
    write_summary(view, tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text()) == summarize(view)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert "0.200 before, 0.600 after" in summary_text(view)
    assert "40 ms median, 50 ms max, p2p, version 2" in summary_text(view)


def config_in(run_dir: Path, **observability: Any) -> RunConfig:
    return run_config(run_dir=str(run_dir), **observability, reasoning_gym_task="chain_sum")


def test_the_link_latest_names_the_newest_run_and_every_run_has_a_separate_folder(tmp_path: Path) -> None:
    config = config_in(tmp_path / "runs")
    folders = []
    for _ in range(3):
        folders.append(RunFolder.create(config))
        assert (tmp_path / "runs/latest").resolve() == folders[-1].path
    names = {folder.path.name for folder in folders}
    assert len(names) == 3
    assert {path.name for path in (tmp_path / "runs").iterdir()} == names | {"latest"}


def test_a_run_folder_holds_the_configuration_that_ran(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = RunFolder.create(config)
    assert build(read_yaml(folder.path / "config.yaml")) == config


def test_a_run_folder_has_the_name_that_is_set(tmp_path: Path) -> None:
    names = [RunFolder.create(config_in(tmp_path, run_name="mine")).path.name for _ in range(2)]
    assert names == ["mine", "mine-2"]
    assert RunFolder.create(config_in(tmp_path)).path.name.endswith("-chain_sum")


@pytest.mark.parametrize("name", ["latest", "targets"])
def test_a_run_cannot_have_a_name_that_the_folder_of_the_runs_needs(name: str) -> None:
    with pytest.raises(UserError, match="run_name: run_dir uses this name for another file: choose another name"):
        run_config(run_name=name)


@pytest.mark.parametrize("setting", ["run_name", "project_name", "experiment_name"])
@pytest.mark.parametrize("name", [".", "..", ".latest-17", "a/b", "a\n", "a\0b", "a b", "n" * 201, "ü" * 101])
def test_a_name_that_no_folder_can_have_is_refused(setting: str, name: str) -> None:
    with pytest.raises(UserError, match=rf"^{setting}: "):
        run_config(**{setting: name})


def test_the_longest_name_of_a_run_is_short_enough_for_all_its_files(tmp_path: Path) -> None:
    config = config_in(tmp_path, run_name="ü" * 100)
    for _ in range(2):
        folder = RunFolder.create(config)
        ScrapeTargets(folder, "http://127.0.0.1:1").write({})
    assert folder.path.name == "ü" * 100 + "-2"


def test_a_long_name_of_the_data_is_shortened_in_the_name_of_the_run(tmp_path: Path) -> None:
    config = run_config(run_dir=str(tmp_path), prompt_data=f"{'ü' * 120}.jsonl", reasoning_gym_task=None)
    assert RunFolder.create(config).path.name.endswith("-" + "ü" * 40)


def test_a_folder_in_place_of_the_link_to_the_newest_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}/latest is a folder, but must be the link to the newest run"):
        RunFolder.create(config_in(tmp_path))


def test_a_run_folder_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run_dir .*file/runs cannot be used .*set --run-dir"):
        RunFolder.create(config_in(tmp_path / "file/runs"))


def test_a_run_folder_on_a_full_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: RunConfig, path: Path) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("model: {}")

    monkeypatch.setattr(run_folder, "write_config", full)
    with pytest.raises(UserError, match=rf"cannot be used \(No space left on device: {tmp_path}\): set --run-dir"):
        RunFolder.create(config_in(tmp_path))


def test_subscribers_write_trace_and_summary_and_serve_metrics_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    with EventSubscribers(config_in(tmp_path, trace=True), folder) as subscribers:
        subscribers.emit(*WHOLE_RUN[:-1])
        subscribers.tick(time.monotonic())
        with urlopen(subscribers.metrics_url, timeout=PATIENCE_SECONDS) as response:
            assert "miles_async_eval_accuracy_ratio" in response.read().decode()
        with urlopen(subscribers.page_url, timeout=PATIENCE_SECONDS) as response:
            assert RUN.run in response.read().decode()
        assert not folder.summary.exists()
        subscribers.emit(WHOLE_RUN[-1])
    assert list(read_events(folder.events)) == WHOLE_RUN
    assert any(entry["name"] == "rollout 1" for entry in json.loads(folder.trace.read_text())["traceEvents"])
    assert json.loads(folder.summary.read_text())["accuracy_after"] == 0.6
    assert b'"accuracy_after":0.6' in folder.report.read_bytes()
    out = capsys.readouterr().out
    assert "Staleness stats: recycled=0, avg_staleness=0.50, max_staleness=1" in out
    assert "0.200 before, 0.600 after" in out


@pytest.mark.parametrize("step", [600.0, -600.0])
def test_subscribers_survive_a_jump_of_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    half = len(WHOLE_RUN) // 2
    after = [structs.replace(event, time=event.time + step) for event in WHOLE_RUN[half:]]
    with EventSubscribers(config_in(tmp_path, trace=True), folder) as subscribers:
        now = time.monotonic()
        wall = time.time()
        subscribers.emit(*WHOLE_RUN[:half])
        subscribers.tick(now)
        monkeypatch.setattr(time, "time", lambda: wall + step)
        subscribers.emit(*after[:-1])
        subscribers.tick(now + 2.0)
        assert list(read_events(folder.events)) == WHOLE_RUN[:half] + after[:-1], "flushed although time went back"
        assert subscribers.stall.stalled_for(now + 2.0) == 0.0
        subscribers.emit(after[-1])
    assert json.loads(folder.summary.read_text())["reason"] == "done"


def test_events_reach_the_disk_once_a_second(tmp_path: Path) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    with EventSubscribers(config_in(tmp_path), folder) as subscribers:
        subscribers.tick(100.0)
        subscribers.emit(RUN)
        subscribers.tick(100.5)
        assert list(read_events(folder.events)) == []
        subscribers.tick(101.0)
        assert list(read_events(folder.events)) == [RUN]


def test_metrics_are_served_when_the_events_of_an_earlier_driver_have_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = config_in(tmp_path, metrics_port=free_port()), RunFolder.create(config_in(tmp_path))
    refused = []

    def earlier(path: Path, *, after: int) -> Iterator[Event]:
        for event in WHOLE_RUN:
            with pytest.raises(OSError, match="refused"):
                urlopen(f"http://127.0.0.1:{config.observability.metrics_port}/metrics", timeout=PATIENCE_SECONDS)
            refused.append(event)
            yield event

    monkeypatch.setattr(subscribers_of_run, "read_events", earlier)
    with EventSubscribers(config, folder, continued=True) as subscribers:
        with urlopen(subscribers.metrics_url, timeout=PATIENCE_SECONDS) as response:
            assert "miles_async_rollout_batches 2.0" in response.read().decode()
        assert refused == WHOLE_RUN
        assert list(read_events(folder.events)) == [], "they are in the log already"


def test_metrics_are_served_at_the_configured_port(tmp_path: Path) -> None:
    port = free_port()
    with EventSubscribers(config_in(tmp_path, metrics_port=port), RunFolder.create(config_in(tmp_path))) as subscribers:
        assert subscribers.metrics_url == f"http://127.0.0.1:{port}/metrics"


def test_the_trace_of_a_run_stays_within_its_configured_size(tmp_path: Path) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    with EventSubscribers(config_in(tmp_path, trace=True, trace_max_bytes=2**16), folder) as subscribers:
        for _ in range(200):
            subscribers.emit(*WHOLE_RUN[:-1])
        subscribers.emit(WHOLE_RUN[-1])
    assert folder.trace.stat().st_size <= 2**16


def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[Path]:
    """Return the files of the event log of a run with 6 MB of events."""
    monkeypatch.setattr(event_log, "CLOSE_SECONDS", PATIENCE_SECONDS)
    folder = RunFolder.create(config_in(tmp_path))
    random_text = random.Random(0)
    with EventSubscribers(config_in(tmp_path, **settings), folder) as subscribers:
        for second in range(600):
            text = random_text.randbytes(5000).hex()
            subscribers.emit(DataSkipped(time=100.0 + second, reason="bad_row", sentence=text))
            subscribers.emit(EventsReceived(time=100.0 + second, number=second))
    return sorted(folder.path.glob("events*"))


def test_the_event_log_of_a_run_is_split_at_the_configured_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [file.name for file in long_run(tmp_path, monkeypatch)] == ["events.jsonl"]
    assert len(long_run(tmp_path, monkeypatch, event_log_rotate_bytes=2**20)) in (6, 7)


def test_the_event_log_of_a_run_stays_within_its_configured_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = long_run(tmp_path, monkeypatch, event_log_max_bytes=2**20)
    assert sum(file.stat().st_size for file in files) <= 2**20
    assert files[0].name == "events-000001.jsonl.gz"
    assert "".join(capsys.readouterr()).count("the event log is full (--event-log-max-bytes)") == 1


@pytest.mark.parametrize("limit, rotated", [(2**16, True), (2**17, False)])
def test_the_logs_of_a_run_are_rotated_at_the_configured_size(limit: int, rotated: bool, tmp_path: Path) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    (folder.logs / "engine-0.log").write_text("x" * 2**16)
    with EventSubscribers(config_in(tmp_path, log_rotate_bytes=limit), folder) as subscribers:
        subscribers.tick(time.monotonic())
    assert (folder.logs / "engine-0.log.1").exists() == rotated


@pytest.mark.parametrize("enabled", [True, False])
def test_the_bar_of_a_run_is_shown_if_it_is_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    folder = RunFolder.create(config_in(tmp_path))
    with EventSubscribers(config_in(tmp_path, progress_bar=enabled), folder) as subscribers:
        subscribers.emit(*WHOLE_RUN)
    assert ("1/2 batches" in terminal.getvalue()) is enabled


def test_a_report_that_cannot_be_written_does_not_keep_the_run_from_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    folder.report.mkdir()
    with EventSubscribers(config_in(tmp_path), folder) as subscribers:
        subscribers.emit(*WHOLE_RUN)
    assert folder.summary.exists()
    assert re.search(r"file of the run cannot be written.*report\.html", "".join(capsys.readouterr()))


def test_a_router_that_died_and_came_back_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventSubscribers(config_in(tmp_path), RunFolder.create(config_in(tmp_path))) as subscribers:
        subscribers.emit(RouterChanged(time=101.0, up=False, engines=0, healthy=0))
        subscribers.emit(RouterChanged(time=102.0, up=True, engines=2, healthy=1))
    printed = "".join(capsys.readouterr())
    assert printed.index("router does not answer") < printed.index("router answers")


def test_a_run_on_a_full_disk_continues_with_one_warning_and_prints_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(config_in(tmp_path))
    folder.events.symlink_to("/dev/full")
    folder.summary.mkdir()
    folder.report.mkdir()
    (tmp_path / "targets").write_text("")
    with EventSubscribers(config_in(tmp_path, trace=True), folder) as subscribers:
        for second, event in enumerate(WHOLE_RUN):
            subscribers.emit(event)
            subscribers.tick(time.monotonic() + 2 * second)
    printed = "".join(capsys.readouterr())
    assert "0.200 before, 0.600 after" in printed
    assert printed.count("cannot be written") == 1


@pytest.mark.usefixtures("_logging_restored")
def test_json_log_lines_contain_the_bound_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json")
    with structlog.contextvars.bound_contextvars(run="r", version=3):
        structlog.get_logger("miles_async.x").info("published", seconds=0.5)
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["run"], line["version"], line["seconds"]) == ("published", "r", 3, 0.5)
    assert line["level"] == "info"


@pytest.mark.usefixtures("_logging_restored")
def test_the_driver_logs_in_the_configured_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert drive(run_config(log_format="json", rm_type="unknown"), [], entry="train.py") == REFUSED
    capsys.readouterr()
    structlog.get_logger("miles_async.x").info("published")
    assert json.loads(capsys.readouterr().err)["event"] == "published"


@pytest.mark.usefixtures("_logging_restored")
def test_json_tracebacks_show_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json")
    secret = "hunter2"
    try:
        int(secret[:0])
    except ValueError:
        structlog.get_logger("miles_async.x").exception("failed")
    err = capsys.readouterr().err
    assert json.loads(err)["exception"][0]["exc_type"] == "ValueError"
    assert secret not in err


@pytest.mark.usefixtures("_logging_restored")
def test_other_libraries_log_only_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("console")
    logging.getLogger("noisy").info("chatter")
    logging.getLogger("noisy").warning("disk almost full")
    out, err = capsys.readouterr()
    assert "chatter" not in err
    assert "disk almost full" in err
    assert out == ""
