"""The real TensorBoard and Weights & Biases, and the log files of a process without a terminal."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event as Recorded

from miles_async.events import BatchDrained, Evaluated, Event, StepEnded, StepStarted
from miles_async.observability.metrics.trackers import Trackers
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.view import RunView
from tests.configuration import run_config
from tests.waiting import wait_until

EVENTS: list[Event] = [
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
        metrics={"loss": 0.5},
    ),
    Evaluated(
        time=5.0,
        name="aime",
        rollout=4,
        accuracy=0.5,
        reward=0.75,
        problems=8,
        seconds=1.0,
        truncated=0.125,
        versions=(3, 4),
    ),
]


def written(folder: Path, **settings: object) -> RunFolder:
    """A run's folder after these events went through the sinks."""
    config = run_config(run_dir=str(folder), experiment_name="sums", **settings)
    run = RunFolder.create(config)
    view = RunView()
    sinks = Trackers(view, config, run)
    for event in EVENTS:
        view.apply(event)
        sinks.observe(event)
    sinks.close()
    return run


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Name, step and value of everything that TensorBoard would show."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        recorded = Recorded.FromString(data[at + 12 : at + 12 + length])
        yield from ((value.tag, recorded.step, value.simple_value) for value in recorded.summary.value)
        at += 16 + length


def test_tensorboard_shows_the_curves_of_the_run(tmp_path: Path) -> None:
    shown = set(scalars(written(tmp_path, use_tensorboard=True).path / "tensorboard"))
    assert {("train/loss", 5, 0.5), ("rollout/reward", 5, 0.25), ("eval/aime", 5, 0.75)} <= shown
    assert ("eval/aime-truncated_ratio", 5, 0.125) in shown


def test_weights_and_biases_keeps_the_run_offline(tmp_path: Path) -> None:
    run = written(tmp_path, use_wandb=True, wandb_mode="offline", wandb_project="arithmetic", wandb_group="tiny")
    (recorded,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    # The file also holds the configuration. Only in the record of the run do a field number (3 is the project, 6 the
    # group) and a length come before the value.
    record = (b"\x1a\x0aarithmetic", b"\x32\x04tiny")
    names = (b"train/loss", b"eval/aime", b"eval/aime-truncated_ratio", b"train/step", *record)
    # Another process writes the file.
    wait_until(lambda: all(name in recorded.read_bytes() for name in names), "the file holds every curve and name")


def test_a_run_without_sinks_writes_nothing_for_them(tmp_path: Path) -> None:
    run = written(tmp_path)
    assert {path.name for path in run.path.iterdir()} == {"config.yaml", "logs"}


def test_a_process_without_a_terminal_writes_its_output_to_files(tmp_path: Path) -> None:
    program = """
import os, sys, structlog
from pathlib import Path
from miles_async.observability.console.logging import configure_worker_logging
configure_worker_logging(Path(sys.argv[1]), "learner-1", "r7")
structlog.get_logger("workers.learner").info("stepped", rollout=3)
print("library noise")
os.write(2, b"native noise\\n")
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "logs")], capture_output=True, check=True)
    assert ended.stdout + ended.stderr == b""
    line = json.loads((tmp_path / "logs" / "learner-1.jsonl").read_text())
    assert (line["event"], line["run"], line["process"], line["rollout"]) == ("stepped", "r7", "learner-1", 3)
    assert sorted((tmp_path / "logs" / "learner-1.log").read_text().split("\n")) == [
        "",
        "library noise",
        "native noise",
    ]
