"""Log lines: structlog for our own, the same renderer for everybody else's warnings. Configured once, by entry points.

Modules get their logger with `structlog.get_logger(__name__)` and say an event with its facts as keywords; `run`,
`rollout`, `group` and `version` are bound once with `structlog.contextvars.bind_contextvars` and follow the task.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor
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
    shared: list[Processor] = [
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
    handler = _BesideTheBar()
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
