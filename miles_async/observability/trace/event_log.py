"""`events.jsonl`: the event stream on disk, one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from miles_async.errors import FatalError, UserError
from miles_async.events import Event, decode, encode

_BUFFER_BYTES = 1 << 20


class EventLogWriter:
    """Appends events to a file.

    Lines are buffered. `tick` flushes them if the last flush was `flush_seconds` ago or earlier, and `close` flushes
    the rest. If the file cannot be written, FatalError is raised once, and all later events are dropped.
    """

    def __init__(self, path: Path, *, flush_seconds: float = 1.0) -> None:
        self._path = path
        self._file = path.open("ab", buffering=_BUFFER_BYTES)
        self._flush_seconds = flush_seconds
        self._flushed = 0.0

    def observe(self, event: Event) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(encode(event) + b"\n")
        except OSError as error:
            raise self._failed(error) from error

    def tick(self, now: float) -> None:
        if self._file.closed or now - self._flushed < self._flush_seconds:
            return
        self._flushed = now
        try:
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> FatalError:
        # Closing tries to write the buffer once more, which fails again, but it closes the file in any case. Later
        # calls then see a closed file and do nothing.
        with suppress(OSError):
            self._file.close()
        return FatalError(f"{self._path} cannot be written ({error.strerror}): make room on its disk, and start again")


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of an `events.jsonl` file in the order in which they were written.

    A last line without a newline was cut off by a crash and is skipped. Raises UserError, with file and line number,
    if any other line is not an event.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except msgspec.DecodeError as error:
                raise UserError(f"{path}, line {number}: not an event of this version: {error}") from error
