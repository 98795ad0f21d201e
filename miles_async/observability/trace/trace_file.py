"""A Chrome trace file of limited size that is valid JSON at every moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import structlog

_HEAD, _TAIL = b'{"displayTimeUnit": "ms", "traceEvents": [\n', b"\n]}\n"
DETAIL_FRACTION = 0.75
"""Details may fill this fraction of the file. The rest is reserved for the few entries of the whole run."""

log = structlog.get_logger(__name__)


class TraceFile:
    """Buffers Chrome trace events and appends them about once a second.

    Each append is a single write that replaces the closing bracket and ends with a new one. The file is therefore valid
    JSON at any time, even if the run is killed. Entries marked as details are dropped once they have filled
    `DETAIL_FRACTION` of the file. If the disk fails, the trace ends with a warning and the run continues.
    """

    def __init__(self, path: Path, max_bytes: int, *, flush_seconds: float = 1.0) -> None:
        """Raises OSError if the file cannot be created."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._file, _HEAD + _TAIL, 0)
        self._end = len(_HEAD)
        """Offset of the closing bracket."""
        self._max_bytes = max_bytes - len(_TAIL)
        self._flush_seconds = flush_seconds
        self._flushed = 0.0
        self._buffer: list[bytes] = []
        self._size = len(_HEAD)
        """Size in bytes, including the buffered entries."""
        self._broken = False
        self.dropped = 0

    def write(self, entry: dict[str, Any], *, detail: bool) -> None:
        line = msgspec.json.encode(entry)
        size = self._size + len(line) + 2
        if size > self._max_bytes * (DETAIL_FRACTION if detail else 1.0):
            self.dropped += 1
            if self.dropped == 1:
                log.warning("the trace is full (--trace-max-bytes); later entries are dropped", file=str(self._path))
            return
        self._size = size
        self._buffer.append(line)

    def tick(self, now: float) -> None:
        if now - self._flushed >= self._flush_seconds:
            self._flushed = now
            self._flush()

    def close(self) -> None:
        self._flush()
        os.close(self._file)

    def _flush(self) -> None:
        if not self._buffer or self._broken:
            return
        lines = (b",\n" if self._end > len(_HEAD) else b"") + b",\n".join(self._buffer)
        self._buffer = []
        try:
            complete = os.pwrite(self._file, lines + _TAIL, self._end) == len(lines) + len(_TAIL)
        except OSError:
            complete = False
        if complete:
            self._end += len(lines)
            return
        # A partial write left the file without its closing bracket: go back to the last valid state and stop.
        self._broken = True
        os.ftruncate(self._file, self._end)
        os.pwrite(self._file, _TAIL, self._end)
        log.warning("the trace file cannot be written any more; the trace ends here", file=str(self._path))
