"""The event log is read as it was written, in parts of limited size and within a limited total size."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from miles_async.errors import UserError
from miles_async.events import Event, EventsMissing, EventsReceived, QueueChanged
from miles_async.observability.page.report import RunData
from miles_async.observability.trace import event_log
from miles_async.observability.trace.event_log import EventLogWriter, read_events
from tests.audit import Audit
from tests.unit.example_events import RUN
from tests.waiting import PATIENCE_SECONDS

LINE_BYTES = 70
"""About the size of one event of these tests."""


def queue_changed(number: int) -> QueueChanged:
    return QueueChanged(time=100.0 + number, depth=number, blocked=0)


def batches(count: int) -> Iterator[Event]:
    """Yield batches of ten events, as the driver receives them."""
    for number in range(count):
        yield queue_changed(number)
        if number % 10 == 9:
            yield EventsReceived(time=100.0 + number, number=number)


EVENTS: list[Event] = [RUN, *batches(2000)]


@pytest.fixture(autouse=True)
def compression_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts are compressed when a log is closed, however slow the machine is."""
    monkeypatch.setattr(event_log, "CLOSE_SECONDS", PATIENCE_SECONDS)


def fail(path: Path, error: OSError) -> None:
    raise AssertionError(f"{path}: {error}")


@contextmanager
def written(folder: Path, *, rotate_bytes: int = 1 << 30, max_bytes: int = 1 << 40) -> Iterator[EventLogWriter]:
    writer = EventLogWriter(folder / "events.jsonl", rotate_bytes=rotate_bytes, max_bytes=max_bytes, on_error=fail)
    try:
        yield writer
    finally:
        writer.close()


def write(folder: Path, events: list[Event], *, rotate_bytes: int = 1 << 30, max_bytes: int = 1 << 40) -> Path:
    with written(folder, rotate_bytes=rotate_bytes, max_bytes=max_bytes) as writer:
        for event in events:
            writer.observe(event)
    return folder / "events.jsonl"


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_log_can_be_read_after_it_was_written(tmp_path: Path) -> None:
    assert list(read_events(write(tmp_path, EVENTS))) == EVENTS
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_truncated_last_line_is_ignored_and_a_broken_line_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, [RUN])
    with path.open("a") as file:
        file.write('{"type":"Queue","ti')
    assert list(read_events(path)) == [RUN]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"events\.jsonl, line 2"):
        list(read_events(path))


def test_a_log_is_split_into_compressed_parts_and_read_as_one(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS, rotate_bytes=200 * LINE_BYTES)
    parts = sorted(file for file in tmp_path.iterdir() if file != path)
    assert len(parts) > 5
    assert gzip.decompress(next(file for file in parts if file.suffix == ".gz").read_bytes()).startswith(b'{"type":')
    assert list(read_events(path)) == EVENTS
    assert path.stat().st_size <= 211 * LINE_BYTES, "at most one batch too many"


def test_uncompressed_parts_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS, rotate_bytes=200 * LINE_BYTES)
    for file in list(tmp_path.glob("*.gz")):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert list(read_events(path)) == EVENTS


def test_a_log_that_is_rotated_while_it_is_read_is_read_without_gaps(tmp_path: Path) -> None:
    with written(tmp_path, rotate_bytes=200 * LINE_BYTES) as writer:
        for event in EVENTS[:1000]:
            writer.observe(event)
        writer.flush()
        reader = read_events(tmp_path / "events.jsonl")
        first = [next(reader) for _ in range(10)]
        for event in EVENTS[1000:]:
            writer.observe(event)
        writer.flush()
        assert [*first, *reader] == EVENTS


def test_a_log_stays_within_its_total_size_and_keeps_its_start_and_its_end(tmp_path: Path) -> None:
    whole = write(tmp_path, EVENTS)
    limit = whole.stat().st_size // 4
    folder = tmp_path / "limited"
    folder.mkdir()
    path = write(folder, EVENTS, max_bytes=limit)
    # The parts are compressed in the background, so the number of deleted parts varies.
    read = list(read_events(path))
    assert size_of(folder) <= limit
    assert read[0] == RUN
    assert read[-1] == EVENTS[-1]
    gaps = [event for event in read if isinstance(event, EventsMissing)]
    assert len(gaps) <= 1
    assert [event for event in read if event not in gaps] == [event for event in EVENTS if event in read]


def gap(folder: Path) -> Path:
    """Write a log of which the second and the third part were deleted."""
    path = write(folder, EVENTS, rotate_bytes=200 * LINE_BYTES)
    for file in folder.glob("events-00000[23].jsonl*"):
        file.unlink()
    return path


def test_deleted_parts_are_reported_to_the_readers(tmp_path: Path) -> None:
    read = list(read_events(gap(tmp_path)))
    [missing] = [event for event in read if isinstance(event, EventsMissing)]
    assert missing.parts == 2
    at = read.index(missing)
    assert missing.time == read[at - 1].time < read[at + 1].time
    assert read[:at] == EVENTS[:at]
    assert read[at + 1 :] == EVENTS[-len(read[at + 1 :]) :]


def test_a_report_on_a_log_with_deleted_parts_mentions_them(tmp_path: Path) -> None:
    run = RunData.from_events(tmp_path, {}, read_events(gap(tmp_path)))
    [notice] = run.values()["state"]["now"]["notices"]
    assert "parts of the event log were deleted" in notice["text"]


def test_the_audit_covers_the_events_up_to_the_first_deleted_part(tmp_path: Path) -> None:
    audit = Audit(None)
    for event in read_events(gap(tmp_path)):
        audit.observe(event)
    assert audit.violations == ["parts of the event log were deleted; later events cannot be checked"]


def test_a_line_that_no_memory_could_hold_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed, such a line is a thousand times smaller."""
    monkeypatch.setattr(event_log, "_LINE_BYTES", 1 << 20)
    path = write(tmp_path, EVENTS, rotate_bytes=200 * LINE_BYTES)
    (tmp_path / "events-000002.jsonl").unlink(missing_ok=True)
    with gzip.open(tmp_path / "events-000002.jsonl.gz", "wb") as part:
        for _ in range(64):
            part.write(bytes(1 << 20))
    with pytest.raises(UserError, match=r"events-000002\.jsonl\.gz is damaged: line 1 has more than 1 MiB"):
        list(read_events(path))


def test_a_damaged_part_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, EVENTS, rotate_bytes=200 * LINE_BYTES)
    part = tmp_path / "events-000002.jsonl.gz"
    if not part.exists():
        part.write_bytes(gzip.compress(part.with_suffix("").read_bytes()))
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"events-000002\.jsonl\.gz is damaged after line"):
        list(read_events(path))
