"""A JSON array on disk that is whole at every moment, and never larger than it may be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import structlog

_HEAD, _TAIL = b'{"displayTimeUnit": "ms", "traceEvents": [\n', b"\n]}\n"
DETAIL_SHARE = 0.75
"""Of the room; the rest is kept for what is written all through the run."""

log = structlog.get_logger(__name__)


class TraceFile:
    """Chrome trace events, gathered and appended about once a second.

    Each append is one write over the closing bracket that ends in a new one, so that whoever reads the file, or kills
    the run, finds valid JSON. Details are left out once they have used their share of the room. A disk that fails ends
    the trace with a warning, and not the run.
    """

    def __init__(self, path: Path, max_bytes: int, *, flush_seconds: float = 1.0) -> None:
        """Raises OSError when the file cannot be made."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.pwrite(self._file, _HEAD + _TAIL, 0)
        self._end = len(_HEAD)
        """Where the closing bracket begins."""
        self._max_bytes = max_bytes - len(_TAIL)
        self._flush_seconds = flush_seconds
        self._flushed = 0.0
        self._gathered: list[bytes] = []
        self._size = len(_HEAD)
        """With what is gathered."""
        self._broken = False
        self.left_out = 0

    def write(self, entry: dict[str, Any], *, detail: bool) -> None:
        line = msgspec.json.encode(entry)
        size = self._size + len(line) + 2
        if size > self._max_bytes * (DETAIL_SHARE if detail else 1.0):
            self.left_out += 1
            if self.left_out == 1:
                log.warning("trace is full (--trace-max-bytes): the rest is left out", file=str(self._path))
            return
        self._size = size
        self._gathered.append(line)

    def tick(self, now: float) -> None:
        if now - self._flushed >= self._flush_seconds:
            self._flushed = now
            self._flush()

    def close(self) -> None:
        self._flush()
        os.close(self._file)

    def _flush(self) -> None:
        if not self._gathered or self._broken:
            return
        lines = (b",\n" if self._end > len(_HEAD) else b"") + b",\n".join(self._gathered)
        self._gathered = []
        try:
            whole = os.pwrite(self._file, lines + _TAIL, self._end) == len(lines) + len(_TAIL)
        except OSError:
            whole = False
        if whole:
            self._end += len(lines)
            return
        self._broken = True
        os.ftruncate(self._file, self._end)
        os.pwrite(self._file, _TAIL, self._end)
        log.warning("trace ends here: the disk took no more of it", file=str(self._path))
