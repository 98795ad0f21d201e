"""Log lines: structlog for our own, the same renderer for everybody else's warnings. Configured once, by entry points.

Modules get their logger with `structlog.get_logger(__name__)` and say an event with its facts as keywords; `run`,
`rollout`, `group` and `version` are bound once with `structlog.contextvars.bind_contextvars` and follow the task.
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

_TRACEBACKS = structlog.processors.ExceptionRenderer(
    # Local variables of every frame would bury the cause, and may hold what nobody should read.
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)


class _BesideTheBar(logging.Handler):
    """Writes to stderr and moves a progress bar on the same terminal out of the way."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def configure_logging(log_format: Literal["console", "json"], *, level: int = logging.INFO) -> None:
    """Ours from `level` up, other libraries from WARNING up; on stderr, since users grep stdout for its three lines."""
    _configure(_BesideTheBar(), log_format, level)


def configure_worker_logging(logs: Path, process: str, run: str, *, level: int = logging.INFO) -> None:
    """Of a process without a terminal: our lines as JSON into `<process>.jsonl`, all other output into `<process>.log`.

    The other output is that of native code, too. The driver shows what matters of both (`log_tail.py`). Every line
    of ours is bound to `run`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{process}.log").open("ab", buffering=0) as log_tail:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log_tail.fileno(), 1)
        os.dup2(log_tail.fileno(), 2)
    # Not a context variable: one set here would end with this call's task.
    bound = _bound(run=run, process=process)
    _configure(logging.FileHandler(logs / f"{process}.jsonl"), "json", level, bound)


def _bound(**values: str) -> Processor:
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
        return [_TRACEBACKS, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
