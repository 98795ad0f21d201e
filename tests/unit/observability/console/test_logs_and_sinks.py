"""Log files of other processes, canonical log lines, a lost terminal, TensorBoard and Weights & Biases."""

from __future__ import annotations

import io
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import structlog
from msgspec.structs import replace

from miles_async.events import (
    BatchDrained,
    Evaluated,
    Event,
    GroupGenerated,
    PublishEnded,
    StepEnded,
    StepStarted,
    decode,
)
from miles_async.observability.console import log_tail as log_tail_module
from miles_async.observability.console.log_tail import ERRORS_SHOWN, LogTail
from miles_async.observability.console.logging import configure_logging
from miles_async.observability.console.run_log import RunLog
from miles_async.observability.metrics import trackers
from miles_async.observability.metrics.trackers import BackgroundTracker, Point, Trackers, WandbTracker
from miles_async.observability.output import VisibleOutput, controls_of, protected
from miles_async.observability.run_folder import DRIVER_LOG, RunFolder
from miles_async.observability.view import RunView
from tests.configuration import run_config

STEP: list[Event] = [
    BatchDrained(time=1.0, rollout=4, depth=7, waited=0.5, recycled=2),
    StepStarted(time=2.0, rollout=4, version=3, staleness=[0, 1, 2], groups=[5, 6, 7]),
    StepEnded(
        time=4.0,
        rollout=4,
        seconds=2.0,
        tokens=600,
        finite=True,
        reward=0.25,
        response_length=4.0,
        metrics={"loss": 0.5, "grad_norm": 1.5, "tokens_per_second": 300.0, "memory_gib": 0.85},
    ),
]
PUBLISHED = PublishEnded(
    time=6.0,
    version=1,
    live=True,
    staged_seconds=1,
    paused_seconds=1,
    stopping_seconds=0.0,
    write_seconds=1,
    resuming_seconds=0.0,
    bytes=1,
    queue=0,
    fenced=[],
)
EVALUATED = Evaluated(
    time=5.0,
    name="aime",
    rollout=4,
    accuracy=0.5,
    reward=0.25,
    problems=8,
    seconds=1.0,
    truncated=0.125,
    versions=(3, 4),
)


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str], _logging_restored: None) -> Callable[[], list[dict[str, Any]]]:
    """The JSON lines on stderr so far."""
    configure_logging("json")
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_step_is_one_line_with_all_of_its_figures(tmp_path: Path, logged: Any) -> None:
    view = RunView()
    steps = RunLog(view, run_config(), RunFolder(tmp_path))
    for event in STEP:
        view.apply(event)
        steps.observe(event)
    (line,) = logged()
    assert line["event"] == "step"
    expected = {
        "rollout": 4, "version": 3, "seconds": 2.0, "tokens": 600, "reward": 0.25, "staleness_mean": 1.0,
        "staleness_max": 2, "queue": 7, "waited": 0.5, "recycled": 2, "loss": 0.5, "grad_norm": 1.5,
        "tokens_per_second": 300.0, "memory_gib": 0.85,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected


def test_lines_after_a_step_began_are_bound_to_its_rollout_and_version(tmp_path: Path, logged: Any) -> None:
    steps = RunLog(RunView(), run_config(), RunFolder(tmp_path))
    steps.observe(STEP[1])
    structlog.get_logger("miles_async.x").warning("something")
    (line,) = logged()
    assert (line["rollout"], line["version"]) == (4, 3)


def test_warnings_of_every_process_and_all_lines_of_the_leading_ones_are_shown(tmp_path: Path, logged: Any) -> None:
    def says(level: str, event: str) -> str:
        return json.dumps({"level": level, "event": event, "logger": "x", "run": "r", "step": 3}) + "\n"

    (tmp_path / "learner-0.jsonl").write_text(says("info", "taught"))
    (tmp_path / "learner-1.jsonl").write_text(says("info", "taught") + says("warning", "slow"))
    LogTail(tmp_path, 2**20).poll()
    assert [(line["process"], line["event"], line["step"]) for line in logged()] == [
        ("learner-0", "taught", 3),
        ("learner-1", "slow", 3),
    ]


def test_errors_of_engines_and_router_are_logged_a_limited_number_of_times(tmp_path: Path, logged: Any) -> None:
    engine = tmp_path / "engine-0.log"
    engine.write_text("INFO all is well\n[2026] ERROR out of memory\nERROR not yet wri")
    log_tail = LogTail(tmp_path, 2**20)
    log_tail.poll()
    assert [line["line"] for line in logged()] == ["[2026] ERROR out of memory"]
    with engine.open("a") as file:
        file.write("tten\n" + "ERROR again\n" * 50)
    log_tail.poll()
    lines = logged()
    assert lines[0]["line"] == "ERROR not yet written"
    assert len(lines) == ERRORS_SHOWN  # the four that were left, and the notice that the rest is in the file
    assert "only in its log file" in lines[-1]["event"]


def test_a_continued_run_repeats_no_line_of_the_driver_before(tmp_path: Path, logged: Any) -> None:
    router = tmp_path / "router.log"
    router.write_text("ERROR a request failed when the run was stopped\n")
    log_tail = LogTail(tmp_path, 2**20, continued=True)
    with router.open("a") as file:
        file.write("ERROR of the new router\n")
    (tmp_path / "engine-1.log").write_text("ERROR of a new engine\n")
    log_tail.poll()
    assert [line["line"] for line in logged()] == ["ERROR of a new engine", "ERROR of the new router"]


def test_a_log_of_the_maximum_size_is_rotated_and_its_process_continues_in_the_emptied_file(tmp_path: Path) -> None:
    log_tail = LogTail(tmp_path, 100)
    with (tmp_path / "engine-0.log").open("a") as engine:
        for line in ("first", "second", "third"):
            print(line * 10, file=engine, flush=True)
            log_tail.poll()
        assert (tmp_path / "engine-0.log").read_text() == "third" * 10 + "\n"
    assert (tmp_path / "engine-0.log.1").read_text() == "first" * 10 + "\n" + "second" * 10 + "\n"


def test_a_log_keeps_the_lines_of_two_rotations_at_most(tmp_path: Path) -> None:
    log_tail = LogTail(tmp_path, 100)
    with (tmp_path / "engine-0.log").open("a") as engine:
        for number in range(1000):
            print(number, file=engine, flush=True)
            log_tail.poll()
    kept = (tmp_path / "engine-0.log.1").read_text() + (tmp_path / "engine-0.log").read_text()
    assert 100 <= len(kept) <= 208
    assert kept.splitlines() == [str(number) for number in range(1000)][-len(kept.splitlines()) :]


def test_every_line_is_read_once_although_its_file_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    monkeypatch.setattr(log_tail_module, "MAX_READ_BYTES", 200)
    draw, log_tail = random.Random(0), LogTail(tmp_path, 1000)
    written = "".join(json.dumps({"event": str(number)}) + "\n" for number in range(1000))
    with (tmp_path / "rollout.jsonl").open("a") as rollout:
        while written:
            # Often more than one poll reads, and often only a part of a line.
            length = draw.randrange(400)
            print(written[:length], end="", file=rollout, flush=True)
            written = written[length:]
            log_tail.poll()
    for _ in range(100):
        log_tail.poll()
    assert [line["event"] for line in logged()] == [str(number) for number in range(1000)]
    assert (tmp_path / "rollout.jsonl.1").exists()


def test_the_drivers_own_log_is_rotated(tmp_path: Path) -> None:
    (tmp_path / DRIVER_LOG).write_text("x" * 100)
    LogTail(tmp_path, 100).poll()
    assert (tmp_path / DRIVER_LOG).read_text() == ""
    assert (tmp_path / f"{DRIVER_LOG}.1").read_text() == "x" * 100


def test_a_log_that_cannot_be_rotated_keeps_its_lines_with_one_warning_and_is_rotated_later(
    tmp_path: Path, logged: Any
) -> None:
    engine, obstacle = tmp_path / "engine-0.log", tmp_path / "engine-0.log.1"
    obstacle.mkdir()
    engine.write_text("x" * 100)
    log_tail = LogTail(tmp_path, 100)
    for _ in range(3):
        log_tail.poll()
    assert [(line["file"], line["level"]) for line in logged()] == [(str(engine), "warning")]
    assert engine.read_text() == "x" * 100
    obstacle.rmdir()
    engine.write_text("x" * 200)
    log_tail.poll()
    assert (engine.read_text(), obstacle.read_text()) == ("", "x" * 200)
    assert logged() == []


def points(*events: Event, always_train_step: bool = False) -> list[Point]:
    view = RunView()
    config = run_config(num_steps_per_rollout=2, wandb_always_use_train_step=always_train_step)
    curves = Trackers(view, config, RunFolder(Path()))
    found: list[Point] = []
    for event in events:
        view.apply(event)
        found += curves.points(event)
    return found


def test_curves_have_the_names_of_slime_over_steps_and_rollouts() -> None:
    train, rollout, evaluation = points(*STEP, EVALUATED)
    assert (train.axis, train.step, train.values["train/loss"]) == ("train/step", 10, 0.5)
    assert (rollout.axis, rollout.step, rollout.values["rollout/staleness_max"]) == ("rollout/step", 5, 2)
    assert (evaluation.axis, evaluation.step) == ("rollout/step", 5)
    assert evaluation.values["eval/aime"] == 0.25
    assert evaluation.values["eval/aime-truncated_ratio"] == 0.125
    assert evaluation.values["eval/aime-missing_samples"] == 0
    assert evaluation.values["eval/aime-oldest_weight_version"] == 3
    assert evaluation.values["eval/aime-newest_weight_version"] == 4


def test_an_evaluation_that_ends_late_is_plotted_over_its_own_rollout_and_moves_no_other_curve() -> None:
    late = replace(EVALUATED, rollout=1)
    *_, evaluation, published = points(*STEP, late, PUBLISHED)
    assert (evaluation.axis, evaluation.step) == ("rollout/step", 2)
    assert (published.axis, published.step) == ("rollout/step", 5)


def test_all_curves_are_plotted_over_optimizer_steps_if_configured() -> None:
    assert {(point.axis, point.step) for point in points(*STEP, EVALUATED, always_train_step=True)} == {
        ("train/step", 10)
    }


def test_weights_and_biases_gets_server_team_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEAM", "0123456789abcdef")
    with patch("wandb.init") as init:
        settings = {"wandb_key": "env:KEY_OF_THE_TEAM", "wandb_host": "http://127.0.0.1:9", "wandb_team": "rl"}
        WandbTracker(run_config(use_wandb=True, **settings), RunFolder(tmp_path))
    [call] = init.call_args_list
    given = call.kwargs["settings"]
    assert (given.api_key, given.base_url, call.kwargs["entity"]) == ("0123456789abcdef", "http://127.0.0.1:9", "rl")
    assert "0123456789abcdef" not in str(call.kwargs["config"])


def test_the_trackers_of_a_run_plot_over_optimizer_steps_if_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    monkeypatch.setattr(trackers, "TensorBoardTracker", lambda folder: kept)
    config = run_config(use_tensorboard=True, wandb_always_use_train_step=True, run_dir=str(tmp_path))
    view = RunView()
    run_trackers = Trackers(view, config, RunFolder.create(config))
    for event in (*STEP, EVALUATED):
        view.apply(event)
        run_trackers.observe(event)
    run_trackers.close()
    assert {point.axis for point in kept.points} == {"train/step"}


def test_a_publish_to_no_engine_adds_no_point() -> None:
    assert points(replace(PUBLISHED, live=False)) == []


class Kept:
    def __init__(self) -> None:
        self.points: list[Point] = []
        self.closed = False

    def write(self, point: Point) -> None:
        self.points.append(point)

    def close(self) -> None:
        self.closed = True


POINT = Point("train/step", 1, {"train/loss": 1.0})


def test_a_tracker_gets_every_point_before_it_is_closed() -> None:
    kept = Kept()
    background = BackgroundTracker("kept", lambda: kept)
    for _ in range(100):
        background.write(POINT)
    background.close()
    assert (len(kept.points), kept.closed) == (100, True)


@pytest.mark.parametrize("breaks", ["open", "write", "close"])
def test_a_tracker_that_fails_causes_one_warning_and_no_exception(breaks: str, logged: Any) -> None:
    class Broken(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.fail("open")

        def write(self, point: Point) -> None:
            self.fail("write")

        def close(self) -> None:
            self.fail("close")

        def fail(self, where: str) -> None:
            if breaks == where:
                raise OSError("no space left")

    background = BackgroundTracker("broken", Broken)
    for _ in range(3):
        background.write(POINT)
    background.close()
    (line,) = logged()
    assert (line["tracker"], line["error"]) == ("broken", "OSError: no space left")


def test_a_tracker_that_hangs_delays_neither_the_run_nor_its_end(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setattr(trackers, "MAX_QUEUED_POINTS", 4)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    for_ever = threading.Event()

    class Hangs(Kept):
        def write(self, point: Point) -> None:
            for_ever.wait()

    background = BackgroundTracker("hangs", Hangs)
    for _ in range(100):
        background.write(POINT)
    background.close()  # returns although the tracker hangs
    for_ever.set()
    assert "hangs and is abandoned" in logged()[0]["event"]


def test_output_to_a_closed_terminal_is_discarded() -> None:
    controller, terminal = os.openpty()
    losses: list[str | None] = []
    with open(terminal, "w") as original:
        stream = protected(original)
        assert isinstance(stream, VisibleOutput)
        stream.file.on_loss = lambda error: losses.append(error.strerror)
        assert stream.isatty()
        os.close(controller)
        for _ in range(2):
            print("step", file=stream, flush=True)
    assert losses == ["Input/output error"]


@pytest.mark.parametrize("unbuffered", [True, False])
def test_a_carriage_return_of_a_progress_bar_is_not_buffered(unbuffered: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    file = io.FileIO(writer, "wb")
    with (
        open(reader, "rb") as pipe,
        io.TextIOWrapper(file, write_through=unbuffered, line_buffering=not unbuffered) as original,
    ):
        controls_of(protected(original)).write("\r")
        assert pipe.read() == b"\r"


def test_event_logs_written_before_missing_and_unfinished_samples_were_counted_can_be_read() -> None:
    evaluated = decode(
        b'{"type": "Evaluated", "time": 1.0, "name": "held_out", "rollout": 4, "accuracy": 0.5, "reward": 0.5, '
        b'"problems": 2, "seconds": 1.0, "truncated": 0.0, "versions": [1, 2]}'
    )
    generated = decode(
        b'{"type": "GroupGenerated", "time": 1.0, "sequence": 4, "generation_seconds": 1.0, "reward_seconds": 1.0, '
        b'"versions": [1, 2], "response_tokens": 9, "reward": 0.5, "truncated": 0, "missing": 0, "by_worker": false}'
    )
    assert isinstance(evaluated, Evaluated)
    assert isinstance(generated, GroupGenerated)
    assert (evaluated.missing, generated.unfinished_rewards) == (0, 0)
