"""The event log: the event stream on disk, one JSON object per line.

    events-000001.jsonl.gz      the first part, which holds the start of the run
    events-000002.jsonl.gz      the second part
    events.jsonl                the newest events

When `events.jsonl` has reached its maximum size, it becomes the next part, and a thread compresses it. If the log
exceeds its total size, its oldest parts are deleted. The first part stays, because reports need the start of the run.
`read_events` reads all parts.

A part ends with a complete batch of events of the rollout worker. So what is known at the end of a part can be stored
beside the log (`observability/snapshot.py`), and a driver that continues the run receives no event of the part again.
"""

from __future__ import annotations

import gzip
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, cast

import msgspec
import structlog

from miles_async.atomic_files import atomic_file
from miles_async.errors import UserError
from miles_async.events import Event, EventsMissing, EventsReceived, decode, encode

_BUFFER_BYTES = 1 << 20
_LAST_BYTES = 64 << 10
"""The last event of a run is much shorter."""
_LINE_BYTES = 64 << 20
"""Limit for a line that is read. A damaged or hostile compressed part can hold a line that no memory can hold."""
CLOSE_SECONDS = 5.0
"""How long to wait for the compression of the last part. A part that is not compressed in time is kept uncompressed."""

log = structlog.get_logger(__name__)


class EventLogWriter:
    """Appends events to a log.

    Lines are buffered until `flush` or `close`. If the log cannot be written, `on_error` is called once with the file
    and the error, and all later events are dropped.
    """

    def __init__(
        self,
        path: Path,
        *,
        rotate_bytes: int,
        max_bytes: int,
        on_error: Callable[[Path, OSError], None],
        on_rotate: Callable[[int], None] = lambda parts: None,
    ) -> None:
        """`path` is the newest file of the log. It is rotated after the batch of events with which its size reaches
        `rotate_bytes`, or earlier if `max_bytes` is small.

        `max_bytes` limits the total size of the log. `on_rotate` is called with the number of parts, before the first
        event of the next part is written. Raises OSError if the file cannot be created.
        """
        self._path = path
        # An eighth, so that the newest file, a part and its compressed copy leave room for earlier parts.
        self._rotate_bytes = min(rotate_bytes, max_bytes // 8)
        self._max_archive_bytes = max_bytes - 3 * self._rotate_bytes
        self._on_error = on_error
        self._on_rotate = on_rotate
        self._full = False
        """Whether to rotate the file before the next event."""
        self._file = path.open("ab", buffering=_BUFFER_BYTES)
        self._size = self._file.tell()
        self._parts = max(_part_numbers(path), default=0)
        self._archiver: Thread | None = None
        self._deleted = False
        """Whether a part was deleted."""

    def observe(self, event: Event) -> None:
        if self._file.closed:
            return
        line = encode(event) + b"\n"
        try:
            if self._full:
                self._rotate()
            self._file.write(line)
            self._size += len(line)
        except OSError as error:
            self._fail(error)
        self._full = self._size >= self._rotate_bytes and isinstance(event, EventsReceived)

    def flush(self) -> None:
        """Write all events to the file, so that they survive this process."""
        if self._file.closed:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)
        if self._archiver is not None:
            self._archiver.join(CLOSE_SECONDS)
            # It may have ended without the part of the last rotation.
            self._start_archiver().join(CLOSE_SECONDS)

    def _fail(self, error: OSError) -> None:
        # Closing tries to write the buffer once more, which fails again, but it closes the file in any case. Later
        # calls then see a closed file and do nothing.
        with suppress(OSError):
            self._file.close()
        self._on_error(self._path, error)

    def _rotate(self) -> None:
        self._file.close()
        self._parts += 1
        self._path.rename(_part(self._path, self._parts))
        self._file = self._path.open("ab", buffering=_BUFFER_BYTES)
        self._size = 0
        self._start_archiver()
        self._on_rotate(self._parts)

    def _start_archiver(self) -> Thread:
        """Return the thread that compresses parts; start it unless it is running."""
        if self._archiver is None or not self._archiver.is_alive():
            self._archiver = Thread(target=self._archive, name="event log", daemon=True)
            self._archiver.start()
        return self._archiver

    def _archive(self) -> None:
        """Compress all parts, and delete the oldest parts of a log that is too large."""
        # A part that cannot be compressed now stays readable, and the next rotation tries again.
        with suppress(OSError):
            self._delete_oldest()
            while (part := self._uncompressed()) is not None:
                _compress(part)
                self._delete_oldest()

    def _uncompressed(self) -> Path | None:
        """Return the oldest part that is not compressed."""
        parts = (_part(self._path, number) for number in _part_numbers(self._path))
        return next((part for part in parts if part.exists()), None)

    def _delete_oldest(self) -> None:
        sizes = {
            number: sum(file.stat().st_size for file in _files(self._path, number))
            for number in _part_numbers(self._path)
        }
        for number in sorted(sizes)[1:]:
            if sum(sizes.values()) <= self._max_archive_bytes:
                return
            for file in _files(self._path, number):
                file.unlink()
            del sizes[number]
            if not self._deleted:
                self._deleted = True
                log.warning(
                    "the event log is full (--event-log-max-bytes); from now on its oldest parts are deleted",
                    deleted=_part(self._path, number).name,
                    folder=str(self._path.parent),
                )


def cut_incomplete_batch(path: Path) -> int:
    """Prepare the log of a run that did not end for a driver that continues it. `path` is the newest file of the log.

    A driver that is killed may have logged a part of the last batch of events, which the next driver receives again. So
    everything after the last complete batch is removed. Returns the number of that batch, 0 if there is none.
    """
    with path.open("a+b") as file:
        file.seek(0)
        logged = file.read()
        begin = logged.rfind(b'{"type":"EventsReceived"')
        end = logged.find(b"\n", begin) + 1
        if begin >= 0 and end == 0:  # the line itself is incomplete
            begin = logged.rfind(b'{"type":"EventsReceived"', 0, begin)
            end = logged.find(b"\n", begin) + 1
        file.truncate(end if begin >= 0 else 0)
    # If the newest file has no complete batch, the last one is at the end of the part before it.
    before = max(_part_numbers(path), default=1) - 1
    last = read_events(path, after=before) if begin < 0 else [decode(logged[begin:end])]
    return max((event.number for event in last if isinstance(event, EventsReceived)), default=0)


def last_event(path: Path) -> Event | None:
    """Return the last event of the newest file of a log; None if there is none, or if the line was cut off."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            *_, line = file.read().splitlines(keepends=True)
            event: Event = decode(line)
            return event
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def read_events(path: Path, *, after: int = 0) -> Iterator[Event]:
    """Yield the events of a log in the order in which they were written, without those of the first `after` parts.

    `path` is the newest file of the log. Deleted parts are reported as one `EventsMissing`. The log may be written
    meanwhile. A last line without a newline was cut off by a crash and is skipped. Raises UserError, with file and line
    number, if any other line is not an event, and OSError if there is no log.
    """
    number, time = after + 1, 0.0
    while (file := _open_next(path, number)) is not None:
        found, name, stream = file
        if found > number:
            yield EventsMissing(time=time, parts=found - number)
        with stream:
            for event in _events(stream, name):
                time = event.time
                yield event
        if name == path:
            return
        number = found + 1


def _open_next(path: Path, number: int) -> tuple[int, Path, IO[bytes]] | None:
    """Open part `number`, the first later part if it was deleted, or the newest file if there are no later parts.

    Returns the number, the file and its stream; None if a crash during a rotation left no newest file.
    """
    while True:
        later = [part for part in _part_numbers(path) if part >= number]
        if later:
            if (opened := _open_part(path, later[0])) is not None:
                return later[0], *opened
            continue  # it was deleted after the listing
        try:
            stream = path.open("rb")
        except FileNotFoundError:
            if number == 1 and not _part_numbers(path):
                raise
            if number not in _part_numbers(path):
                return None
            continue
        if number not in _part_numbers(path):
            return number, path, stream
        stream.close()  # it was rotated after the listing


def _open_part(path: Path, number: int) -> tuple[Path, IO[bytes]] | None:
    """Open a part, compressed or not; None if the part was deleted."""
    plain = _part(path, number)
    compressed = _compressed(plain)
    # The compressed file is tried again at the end, because the part may be compressed between the first two attempts.
    for file in (compressed, plain, compressed):
        with suppress(FileNotFoundError):
            return file, cast("IO[bytes]", gzip.open(file)) if file == compressed else file.open("rb")
    return None


def _events(stream: IO[bytes], file: Path) -> Iterator[Event]:
    complete = 0
    """Lines read so far."""
    try:
        for line in iter(lambda: stream.readline(_LINE_BYTES), b""):
            if not line.endswith(b"\n"):
                if len(line) == _LINE_BYTES:
                    raise UserError(
                        f"{file} is damaged: line {complete + 1} has more than {_LINE_BYTES >> 20} MiB; delete it to "
                        "read the other parts"
                    )
                return
            yield decode(line)
            complete += 1
    except msgspec.DecodeError as error:
        raise UserError(f"{file}, line {complete + 1}: not an event of this version: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{file} is damaged after line {complete}: {error}; delete it to read the other parts"
        ) from error


def _compress(part: Path) -> None:
    """Replace a part by a compressed file."""
    with atomic_file(_compressed(part)) as temporary, part.open("rb") as plain, gzip.open(temporary, "wb") as target:
        shutil.copyfileobj(plain, target, _BUFFER_BYTES)
    part.unlink()


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:06}{path.suffix}")


def _compressed(part: Path) -> Path:
    return part.with_name(f"{part.name}.gz")


def _files(path: Path, number: int) -> list[Path]:
    part = _part(path, number)
    return [file for file in (part, _compressed(part)) if file.exists()]


def _part_numbers(path: Path) -> list[int]:
    """Return the numbers of the parts that exist, in ascending order."""
    name = re.compile(rf"{re.escape(path.stem)}-(\d+){re.escape(path.suffix)}(?:\.gz)?")
    return sorted(
        {int(match[1]) for file in path.parent.glob(f"{path.stem}-*") if (match := name.fullmatch(file.name))}
    )
