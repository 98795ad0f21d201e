"""`events.jsonl`: the event stream on disk, one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from miles_async.errors import FatalError, UserError
from miles_async.events import Event, decode, encode

_BUFFER_BYTES = 1 << 20


class EventLogWriter:
    """Buffers lines; they reach the disk when `tick` finds the last flush `flush_seconds` ago, and at `close`.

    Raises Fatal once, when the disk takes no more; what comes after that is left out.
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
            raise self._refused(error) from error

    def tick(self, now: float) -> None:
        if self._file.closed or now - self._flushed < self._flush_seconds:
            return
        self._flushed = now
        try:
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> FatalError:
        # What the buffer holds can go nowhere, and must not be tried again; closing tries, and closes all the same.
        with suppress(OSError):
            self._file.close()
        return FatalError(f"{self._path} cannot be written ({error.strerror}): make room on its disk, and start again")


def read_events(path: Path) -> Iterator[Event]:
    """The events of a trace, in the order they were written.

    A last line without its newline was cut by a crash and is left out. Raises UserError that names file and line where
    any other line is no event.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except msgspec.DecodeError as error:
                raise UserError(f"{path}, line {number}: not an event of this version: {error}") from error
