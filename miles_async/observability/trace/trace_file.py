"""A Chrome trace file of limited size that is valid JSON at every moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

_HEAD, _TAIL = b'{"displayTimeUnit": "ms", "traceEvents": [\n', b"\n]}\n"
DETAIL_FRACTION = 0.75
"""Details may fill this fraction of the file. The rest is reserved for the few entries of the whole run."""

log = structlog.get_logger(__name__)


class TraceFile:
    """Buffers Chrome trace events and appends them at each `flush`.

    Each append is a single write that replaces the closing bracket and ends with a new one. The file is therefore valid
    JSON at any time, even if the run is killed. Entries marked as details are dropped once they have filled
    `DETAIL_FRACTION` of the file. If the file cannot be written, `on_error` is called once with the file and the error,
    and the trace ends.
    """

    def __init__(self, path: Path, max_bytes: int, *, on_error: Callable[[Path, OSError], None], end: int = 0) -> None:
        """`end` is an earlier `end` of the file, after which the file is continued; 0 begins a new file.

        Raises OSError if the file cannot be created.
        """
        self._path = path
        self._on_error = on_error
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self.end = max(end, len(_HEAD))
        """Offset of the closing bracket."""
        os.ftruncate(self._file, self.end)
        os.pwrite(self._file, _HEAD, 0)
        os.pwrite(self._file, _TAIL, self.end)
        self._max_bytes = max_bytes - len(_TAIL)
        self._buffer: list[bytes] = []
        self._size = self.end
        """Size in bytes, including the buffered entries."""
        self._broken = False
        self.dropped = 0

    def write(self, entry: dict[str, Any], *, detail: bool = False) -> None:
        line = msgspec.json.encode(entry)
        size = self._size + len(line) + 2
        if size > self._max_bytes * (DETAIL_FRACTION if detail else 1.0):
            self.dropped += 1
            if self.dropped == 1:
                log.warning("the trace is full (--trace-max-bytes); later entries are dropped", file=str(self._path))
            return
        self._size = size
        self._buffer.append(line)

    def close(self) -> None:
        self.flush()
        with suppress(OSError):
            os.close(self._file)

    def flush(self) -> None:
        if not self._buffer or self._broken:
            return
        lines = (b",\n" if self.end > len(_HEAD) else b"") + b",\n".join(self._buffer)
        self._buffer = []
        try:
            if os.pwrite(self._file, lines + _TAIL, self.end) < len(lines) + len(_TAIL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.end += len(lines)
        except OSError as error:
            # A partial write left the file without its closing bracket: go back to the last valid state and stop.
            self._broken = True
            with suppress(OSError):
                os.ftruncate(self._file, self.end)
                os.pwrite(self._file, _TAIL, self.end)
            self._on_error(self._path, error)
