"""Repeats the important lines of all processes' log files in the driver's log, and rotates the files.

`logs/*.jsonl` hold the structured log lines of our own processes. Warnings and errors are repeated, and every line of
the leading processes, which are details for programs. `logs/*.log` hold the output of Ray, SGLang, the router and
native libraries. Lines that report an error are repeated, up to a limit per file.

A file that has reached its maximum size is copied to `<name>.1`, over an earlier copy, and truncated. A file that was
renamed instead would still get the output of the processes that have opened it. All of them append (O_APPEND), so after
the truncation they write to the beginning of the file.

The files are polled instead of watched with inotify: the driver wakes up several times a second in any case, a run has
a few dozen files, and polling also works on network file systems.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from miles_async.observability.console.logging import details_logger
from miles_async.observability.run_folder import DRIVER_LOG

ERRORS_SHOWN = 5
"""Most error lines repeated per file, so that a server that fails at every request does not flood the terminal."""
MAX_LINE_CHARACTERS = 300
LEADING = ("learner-0", "rollout")
"""Processes whose lines are all repeated. The other learner ranks log the same steps as rank 0."""
MAX_READ_BYTES = 1 << 20
"""Most bytes read from one file per poll."""

_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|panicked at")
_HIDDEN_KEYS = ("event", "level", "logger", "timestamp", "process", "run", "exception")

log = structlog.get_logger(__name__)
details = details_logger(__name__)


@dataclass(slots=True)
class _File:
    path: Path
    rotate_bytes: int
    """Size at which the file is rotated."""
    read: int = 0
    """Bytes read so far."""
    rest: bytes = b""
    """The beginning of a line whose end has not been read."""
    errors: int = 0


class LogTail:
    """Reads the new lines of all log files at each `poll`, and rotates files that have reached `rotate_bytes`.

    If a file cannot be rotated, for example because the disk is full, a warning says so once, and rotation is tried
    again when the size of the file has doubled.
    """

    def __init__(self, logs: Path, rotate_bytes: int, *, continued: bool = False) -> None:
        """`continued` is whether an earlier driver of the run has repeated the lines that the files already have."""
        self._logs = logs
        self._rotate_bytes = rotate_bytes
        read = self._paths() if continued else []
        self._files = {path.name: _File(path, rotate_bytes, read=_size(path)) for path in read}
        self._rotation_failed = False

    def poll(self) -> None:
        for path in self._paths():
            file = self._files.setdefault(path.name, _File(path, self._rotate_bytes))
            self._show(file, path)
            if _size(path) >= file.rotate_bytes:
                self._rotate(file)

    def _paths(self) -> list[Path]:
        return sorted(self._logs.glob("*.log")) + sorted(self._logs.glob("*.jsonl"))

    def _rotate(self, file: _File) -> None:
        earlier = file.path.with_name(f"{file.path.name}.1")
        try:
            shutil.copyfile(file.path, earlier)
            # What a process writes between these two calls is lost: at most a few lines.
            os.truncate(file.path, 0)
        except OSError as error:
            with suppress(OSError):
                earlier.unlink(missing_ok=True)
            file.rotate_bytes *= 2
            if not self._rotation_failed:
                self._rotation_failed = True
                log.warning(
                    "a log file cannot be rotated and keeps growing: free some disk space",
                    file=str(file.path),
                    error=error.strerror,
                )
            return
        while self._show(file, earlier):
            pass
        file.read, file.rotate_bytes = 0, self._rotate_bytes

    def _show(self, file: _File, path: Path) -> bool:
        """Repeat the important new lines of `path`, the file or its copy. Returns whether it had anything new."""
        if file.path.name == DRIVER_LOG:
            return False
        before = file.read
        show = self._show_structured if file.path.suffix == ".jsonl" else self._show_plain
        for line in _new_lines(file, path):
            show(file, line)
        return file.read > before

    def _show_structured(self, file: _File, line: str) -> None:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            return self._show_plain(file, line)
        level = logging.getLevelNamesMapping().get(str(record.get("level", "")).upper(), logging.INFO)
        process = file.path.stem
        if level >= logging.WARNING or process in LEADING:
            facts = {name: value for name, value in record.items() if name not in _HIDDEN_KEYS}
            where = {"file": str(file.path)} if "exception" in record else {}
            logger = log if level >= logging.WARNING else details
            logger.log(level, str(record.get("event", line)), process=process, **facts, **where)
        return None

    def _show_plain(self, file: _File, line: str) -> None:
        if not _ERROR.search(line):
            return
        file.errors += 1
        if file.errors <= ERRORS_SHOWN:
            shown = line[:MAX_LINE_CHARACTERS]
            log.error("a process logged an error", process=file.path.stem, line=shown, file=str(file.path))
        if file.errors == ERRORS_SHOWN:
            log.error("further errors of this process are only in its log file", process=file.path.stem)


def _size(path: Path) -> int:
    """Size in bytes; 0 if the file cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _new_lines(file: _File, path: Path) -> list[str]:
    """Return the lines that were completed since the last call; none if `path` cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(file.read)
            new = stream.read(MAX_READ_BYTES)
    except OSError:
        return []
    file.read += len(new)
    text = file.rest + new
    # The process may still be writing the last line. A line that is longer than the buffer is taken in parts.
    end = text.rfind(b"\n") + 1
    if len(text) - end >= MAX_READ_BYTES:
        end = len(text)
    file.rest = text[end:]
    return text[:end].decode(errors="replace").splitlines()
