"""Repeats the important lines of all processes' log files in the driver's log.

`logs/*.jsonl` hold the structured log lines of our own processes. Warnings and errors are repeated, and every line of
the leading processes, which are details for programs. `logs/*.log` hold the output of Ray, SGLang, the router and
native libraries. Lines that report an error are repeated, up to a limit per file.

The files are polled instead of watched with inotify: the driver wakes up several times a second in any case, a run has
a few dozen files, and polling also works on network file systems.
"""

from __future__ import annotations

import json
import logging
import re
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
    read: int = 0
    """Bytes read so far."""
    errors: int = 0


class LogTail:
    """Reads the new lines of all log files at each `poll`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._files: dict[str, _File] = {}

    def poll(self) -> None:
        for path in sorted(self._logs.glob("*.log")) + sorted(self._logs.glob("*.jsonl")):
            if path.name == DRIVER_LOG:
                continue
            file = self._files.setdefault(path.name, _File(path))
            show = self._show_structured if path.suffix == ".jsonl" else self._show_plain
            for line in _new_lines(file):
                show(file, line)

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


def _new_lines(file: _File) -> list[str]:
    """Return the lines that were completed since the last poll; none if the file cannot be read."""
    try:
        with file.path.open("rb") as stream:
            stream.seek(file.read)
            new = stream.read(MAX_READ_BYTES)
    except OSError:
        return []
    # The process may still be writing the last line, so it is read by a later poll. A full buffer is taken entirely:
    # it may lack a newline, and waiting for one would never make progress.
    complete = new[: new.rfind(b"\n") + 1] if len(new) < MAX_READ_BYTES else new
    file.read += len(complete)
    return complete.decode(errors="replace").splitlines()
