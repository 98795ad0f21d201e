"""A driver that continues a run shows the same from a snapshot as from the whole event log."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import structlog
from msgspec.structs import replace

from miles_async.events import Event, EventsReceived, RunEnded, RunStarted
from miles_async.observability import snapshot, subscribers
from miles_async.observability.page.report import RunData
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.snapshot import read_snapshot
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.trace.event_log import cut_incomplete_batch, read_events
from tests.configuration import run_config
from tests.sim.world import World
from tests.unit.example_events import RUN
from tests.waiting import PATIENCE_SECONDS

ROTATE_BYTES = 2**16
EVENTS_PER_BATCH = 50


def config_in(folder: Path) -> Any:
    return run_config(run_dir=str(folder), trace=True, event_log_rotate_bytes=ROTATE_BYTES, log_format="json")


def batches() -> Iterator[list[Event]]:
    """Yield the events of a simulated run, as the driver receives them."""
    settings = {"rollout_batch_size": 8, "num_rollout": 20, "max_weight_staleness": 1, "over_sampling_batch_size": 16}
    simulated = World(config=run_config(**settings)).run().trace.events
    events = [replace(RUN, time=simulated[0].time), *(event for event in simulated if not starts_or_ends(event))]
    for number, start in enumerate(range(0, len(events), EVENTS_PER_BATCH), 1):
        batch = events[start : start + EVENTS_PER_BATCH]
        yield [*batch, EventsReceived(time=batch[-1].time, number=number)]


def starts_or_ends(event: Event) -> bool:
    return isinstance(event, (RunStarted, RunEnded))


def shown(folder: RunFolder, later: list[list[Event]]) -> dict[str, Any]:
    """Continue the run of a folder with later batches, end it, and return everything that users see of it."""
    with EventSubscribers(config_in(folder.path.parent), folder, continued=True) as continued:
        for batch in later:
            continued.emit(*batch)
        with urlopen(continued.metrics_url, timeout=PATIENCE_SECONDS) as response:
            metrics = response.read().decode().splitlines()
        continued.emit(RunEnded(time=later[-1][-1].time, reason="done"))
    volatile = ("_created", "disk_free_bytes")
    return {
        "metrics": [line for line in metrics if not any(name in line for name in volatile)],
        "summary": folder.summary.read_text(),
        "report": folder.report.read_text().replace(str(folder.path.parent), "runs"),
        "trace": folder.trace.read_text(),
        "log": list(read_events(folder.events)),
    }


def interrupted_run(root: Path, batches_of_first_driver: list[list[Event]]) -> RunFolder:
    folder = RunFolder.create(config_in(root))
    with EventSubscribers(config_in(root), folder) as first:
        for batch in batches_of_first_driver:
            first.emit(*batch)
    return folder


@pytest.fixture(scope="module")
def run() -> list[list[Event]]:
    return list(batches())


@pytest.fixture(scope="module")
def first_driver(tmp_path_factory: pytest.TempPathFactory, run: list[list[Event]]) -> RunFolder:
    """The folder of a run whose driver has received all events and was then interrupted."""
    return interrupted_run(tmp_path_factory.mktemp("runs"), run)


@pytest.fixture
def folder(tmp_path: Path, first_driver: RunFolder) -> RunFolder:
    copy = RunFolder(tmp_path / first_driver.path.name)
    shutil.copytree(first_driver.path, copy.path)
    return copy


@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.95])
def test_the_run_is_shown_as_if_the_whole_log_had_been_read(
    tmp_path: Path, run: list[list[Event]], fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = int(fraction * len(run))
    folder = interrupted_run(tmp_path / "runs", run[:at])
    copy = RunFolder(tmp_path / "copies" / folder.path.name)
    shutil.copytree(folder.path, copy.path)
    copy.snapshot.unlink()
    assert (taken := read_snapshot(folder.snapshot)) is not None
    assert taken.parts >= 1

    read = []

    def later_events(path: Path, *, after: int = 0) -> Iterator[Event]:
        read.append(after)
        return read_events(path, after=after)

    monkeypatch.setattr(subscribers, "read_events", later_events)
    from_snapshot, from_log = shown(folder, run[at:]), shown(copy, run[at:])
    for what in from_log:
        assert from_snapshot[what] == from_log[what], what
    assert read == [taken.parts, 0]


def test_a_part_ends_with_a_complete_batch_so_that_no_event_is_received_twice(
    folder: RunFolder, run: list[list[Event]]
) -> None:
    parts = len(list(folder.path.glob("events-*")))
    assert parts > 2
    for part in range(1, parts + 1):
        before = len(list(read_events(folder.events))) - len(list(read_events(folder.events, after=part)))
        assert before % (EVENTS_PER_BATCH + 1) == 0
    assert cut_incomplete_batch(folder.events) == len(run)


def test_the_number_of_the_last_batch_is_found_without_reading_the_whole_log(folder: RunFolder) -> None:
    parts = sorted(folder.path.glob("events-*"))
    events = list(read_events(folder.events, after=len(parts) - 1))
    newest = len(list(read_events(folder.events, after=len(parts))))
    last = events[-newest - 1]
    assert isinstance(last, EventsReceived)
    folder.events.write_bytes(b"")
    parts[0].write_bytes(b"not an event\n")
    assert cut_incomplete_batch(folder.events) == last.number


def test_the_report_reads_the_snapshot_and_the_later_events(folder: RunFolder) -> None:
    with_snapshot = RunData.read(folder).values()
    folder.snapshot.unlink()
    assert RunData.read(folder).values() == with_snapshot


@pytest.mark.parametrize("damage", ["cut", "other code", "too large", "a class that may not be loaded", "missing"])
def test_without_a_usable_snapshot_the_whole_log_is_read(
    folder: RunFolder, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = folder.snapshot.read_bytes()
    match damage:
        case "cut":
            folder.snapshot.write_bytes(whole[: len(whole) // 2])
        case "other code":
            folder.snapshot.write_bytes(bytes(32) + whole[32:])
        case "too large":
            monkeypatch.setattr(snapshot, "MAX_BYTES", 100)
        case "a class that may not be loaded":
            folder.snapshot.write_bytes(whole[:32] + pickle.dumps(os.system))
        case _:
            folder.snapshot.unlink()
    with structlog.testing.capture_logs() as logged:
        assert read_snapshot(folder.snapshot) is None
    warned = damage not in ("other code", "missing")
    assert [entry["event"][:33] for entry in logged] == ["the snapshot of the run cannot be"] * warned
    assert RunData.read(folder).view.groups.fed


def test_a_snapshot_that_calls_a_function_is_refused_and_the_function_does_not_run(
    tmp_path: Path, folder: RunFolder
) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "attacked"),)

    folder.snapshot.write_bytes(folder.snapshot.read_bytes()[:32] + pickle.dumps(Attack()))
    with structlog.testing.capture_logs() as logged:
        assert read_snapshot(folder.snapshot) is None
    assert "posix.mkdir" in logged[0]["error"]
    assert not (tmp_path / "attacked").exists()
