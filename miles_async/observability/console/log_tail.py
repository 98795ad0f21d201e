"""What the processes of a run write into its `logs/`, of which the terminal shows only what matters.

`*.jsonl` are our own lines: warnings and errors are shown, and what the leading processes say. `*.log` is what Ray,
SGLang, the router and native libraries print: lines that speak of an error are shown, the first few of each file.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

LOOK_SECONDS = 1.0
ERRORS_SHOWN = 5
"""Of each file; a server that fails in every request must not flood the terminal."""
LONGEST_LINE = 300
LEADING = ("learner-0", "rollout")
"""Every rank says the same of a step; the others are shown only when something is wrong."""
READ_AT_MOST = 1 << 20

_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|panicked at")
_NOT_SHOWN = ("event", "level", "logger", "timestamp", "process", "run", "exception")

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _File:
    path: Path
    read: int = 0
    errors: int = 0


class LogTail:
    """Call `look` as often as you like; it reads about once a second, and only what is new."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._files: dict[str, _File] = {}
        self._looked = 0.0

    def poll(self, now: float) -> None:
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for path in sorted(self._logs.glob("*.log")) + sorted(self._logs.glob("*.jsonl")):
            file = self._files.setdefault(path.name, _File(path))
            show = self._show_ours if path.suffix == ".jsonl" else self._show_theirs
            for line in _new_lines(file):
                show(file, line)

    def _show_ours(self, file: _File, line: str) -> None:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            return self._show_theirs(file, line)
        level = logging.getLevelNamesMapping().get(str(record.get("level", "")).upper(), logging.INFO)
        process = file.path.stem
        if level >= logging.WARNING or process in LEADING:
            facts = {name: value for name, value in record.items() if name not in _NOT_SHOWN}
            where = {"file": str(file.path)} if "exception" in record else {}
            log.log(level, str(record.get("event", line)), process=process, **facts, **where)
        return None

    def _show_theirs(self, file: _File, line: str) -> None:
        if not _ERROR.search(line):
            return
        file.errors += 1
        if file.errors <= ERRORS_SHOWN:
            log.error("a process wrote an error", process=file.path.stem, line=line[:LONGEST_LINE], file=str(file.path))
        if file.errors == ERRORS_SHOWN:
            log.error("its further errors are only in its file", process=file.path.stem)


def _new_lines(file: _File) -> list[str]:
    """The whole lines since the last look; a line that is still being written waits."""
    with file.path.open("rb") as stream:
        stream.seek(file.read)
        new = stream.read(READ_AT_MOST)
    whole = new[: new.rfind(b"\n") + 1] if len(new) < READ_AT_MOST else new
    file.read += len(whole)
    return whole.decode(errors="replace").splitlines()
