"""Configures logging once per process: structlog for our own lines, the same renderer for other libraries' warnings.

A module gets its logger with `structlog.get_logger(__name__)` and logs a short event with its facts as keywords. The
keys `run`, `rollout`, `group` and `version` are bound with `structlog.contextvars.bind_contextvars`, so that every
later line of the same task carries them.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, Processor
from tqdm import tqdm

from miles_async.config.redaction import redact_text
from miles_async.observability.console.lossy_output import survive_lost_output

_TRACEBACKS = structlog.processors.ExceptionRenderer(
    # The local variables of every frame would hide the cause among noise, and they may hold secrets.
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)


class _ProgressBarHandler(logging.Handler):
    """Writes to stderr without breaking a progress bar on the same terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _DroppingFileHandler(logging.FileHandler):
    """Appends to a file, and drops lines that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print nothing: standard error goes to a file on the same disk."""


def configure_logging(log_format: Literal["console", "json"], *, level: int = logging.INFO) -> None:
    """Log to stderr: our own lines from `level` up, those of other libraries from WARNING up.

    Log lines go to stderr because users grep stdout for the three lines of `PlainLines`.
    """
    _configure(_ProgressBarHandler(), log_format, level)


def configure_worker_logging(logs: Path, process: str, run: str, *, level: int = logging.INFO) -> None:
    """Configure logging for a process without a terminal.

    Our own lines go to `<logs>/<process>.jsonl` as JSON, each with the keys `run` and `process`. All other output,
    including that of native code, goes to `<logs>/<process>.log`. The driver shows the important lines of both files
    (see `LogTail`). Lines that cannot be written, for example because the disk is full, are dropped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{process}.log").open("ab", buffering=0) as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Replacing the file descriptors, not sys.stdout, also captures what native code prints.
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # A user's function may print, and must not fail because its output cannot be written.
    survive_lost_output()
    # These keys are not context variables, because a context variable set here is only visible to the current task.
    binding = _bind(run=run, process=process)
    _configure(_DroppingFileHandler(logs / f"{process}.jsonl"), "json", level, binding)


def _bind(**values: str) -> Processor:
    def add(logger: Any, name: str, event: EventDict) -> EventDict:
        return {**values, **event}

    return add


def _configure(handler: logging.Handler, log_format: Literal["console", "json"], level: int, *first: Processor) -> None:
    shared: list[Processor] = [
        *first,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(log_format)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("miles_async", "workers", "__main__"):
        logging.getLogger(name).setLevel(level)


def _rendering(log_format: Literal["console", "json"]) -> list[Processor]:
    if log_format == "json":
        return [_TRACEBACKS, structlog.processors.JSONRenderer(), _redact]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain), _redact]


def _redact(logger: Any, name: str, rendered: Any) -> Any:
    """Remove secrets from the finished line, wherever in it they are: a message of a library may quote a URL."""
    return redact_text(rendered)
