"""An event log that cannot be written ends with one report."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

import pytest

from miles_async.observability.trace.event_log import EventLogWriter, read_events
from tests.unit.example_events import RUN


class FailingFile:
    """Stands in for an open file whose writes fail from now on."""

    closed = False

    def __init__(self, file: IO[bytes], number: int) -> None:
        self._file = file
        self._number = number

    def write(self, data: bytes) -> int:
        raise OSError(self._number, os.strerror(self._number))

    def close(self) -> None:
        self._file.close()
        self.closed = True


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_an_event_log_that_cannot_be_written_ends_with_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    errors: list[tuple[Path, int | None]] = []
    path = tmp_path / "events.jsonl"
    writer = EventLogWriter(
        path, rotate_bytes=1 << 20, max_bytes=1 << 30, on_error=lambda file, error: errors.append((file, error.errno))
    )
    writer.observe(RUN)
    writer.flush()
    monkeypatch.setattr(writer, "_file", FailingFile(writer._file, number))
    for _ in range(3):
        writer.observe(RUN)
        writer.flush()
    writer.close()
    assert errors == [(path, number)]
    assert list(read_events(path)) == [RUN]
