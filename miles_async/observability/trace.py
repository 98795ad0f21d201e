"""`events.jsonl`: the event stream on disk, one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from miles_async.errors import UserError
from miles_async.observability.events import Event, decode, encode

_BUFFER_BYTES = 1 << 20


class TraceWriter:
    """Buffers lines; they reach the disk when `tick` finds the last flush `flush_seconds` ago, and at `close`."""

    def __init__(self, path: Path, *, flush_seconds: float = 1.0) -> None:
        self._file = path.open("ab", buffering=_BUFFER_BYTES)
        self._flush_seconds = flush_seconds
        self._flushed = 0.0

    def observe(self, event: Event) -> None:
        self._file.write(encode(event) + b"\n")

    def tick(self, now: float) -> None:
        if now - self._flushed >= self._flush_seconds:
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        self._file.close()


def read_trace(path: Path) -> Iterator[Event]:
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
