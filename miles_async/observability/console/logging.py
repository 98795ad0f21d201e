"""Configures logging once per process: structlog for our own lines, the same renderer for other libraries' warnings.

A module gets its logger with `structlog.get_logger(__name__)` and logs a short event with its facts as keywords. The
keys `run`, `rollout`, `group` and `version` are bound with `structlog.contextvars.bind_contextvars`, so that every
later line of the same task carries them.

A line goes to two places: to stderr, as a sentence for people (`console`) or as JSON for programs (`json`), and to
`logs/driver.jsonl` of the run, always as JSON in ASCII. Lines of a `details_logger` are for programs only.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from miles_async.config.redaction import redact_text
from miles_async.observability.console.lines import write_line
from miles_async.observability.output import protect_output

OWN = ("miles_async", "workers", "__main__")
"""The packages whose log lines are our own."""
CHATTY = ("megatron", "ray", "sglang", "torch", "transformers")
"""Packages whose warnings are rarely about the run. People see only their errors."""
DETAILS = ".details"
"""Suffix of the names of the loggers of `details_logger`."""
_NOT_FACTS = ("event", "level", "logger", "timestamp", "run", "exc_info", "stack_info")
MIN_COLUMNS = 40
"""Text is wrapped as if a narrower terminal had this width."""
_TEXTS = ("why", "what", "reason", "error", "line", "knob")
"""Facts that people understand without their name."""

log = structlog.get_logger(__name__)

_TRACEBACKS = structlog.processors.ExceptionRenderer(
    # The local variables of every frame would hide the cause among noise, and they may hold secrets.
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)


class _LineHandler(logging.Handler):
    """Writes to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record), sys.stderr)
        except Exception:
            self.handleError(record)


class _DroppingFileHandler(logging.FileHandler):
    """Appends to a file, and drops lines that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print nothing: standard error goes to a file on the same disk."""


def report_lost_output(error: OSError) -> None:
    """Log that standard output was lost. Without standard error there is no place for a log line."""
    log.warning("standard output was lost and is discarded from now on", error=error.strerror)


def fit_to_terminal(text: str, stream: TextIO, *, indent: int) -> str:
    """Wrap the text at the width of the terminal, without breaking words. Text for a file stays one line.

    Lines after the first one begin with `indent` spaces.
    """
    if not stream.isatty():
        return text
    columns = max(shutil.get_terminal_size().columns, MIN_COLUMNS)
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def details_logger(name: str) -> Any:
    """Return a logger for lines that people do not need to see, such as the line with every metric of a step.

    `name` is the name of the module. The lines are shown with the format `json` and written to log files.
    """
    return structlog.get_logger(name + DETAILS)


def configure_logging(log_format: Literal["console", "json"]) -> None:
    """Log to stderr: our own lines from INFO up, those of other libraries from WARNING up.

    With the format `console`, lines without a use for people are left out (see `_is_for_people`). Log lines go to
    stderr because users grep stdout for the three lines of `PlainLines`.
    """
    handler = _LineHandler()
    if log_format == "console":
        handler.addFilter(_is_for_people)
    _configure(handler, log_format)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Inside the block, also append every log line to the file `path` as JSON. Use it after `configure_logging`.

    Lines that cannot be written, for example because the disk is full, are dropped.
    """
    handler = _DroppingFileHandler(path, delay=True)
    handler.setFormatter(_formatter("json"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def configure_worker_logging(logs: Path, process: str, run: str) -> None:
    """Configure logging for a process without a terminal.

    Our own lines go to `<logs>/<process>.jsonl` as JSON, each with the keys `run` and `process`. All other output,
    including that of native code, goes to `<logs>/<process>.log`; Python code and child processes of this project write
    visible text there. The driver shows the important lines of both files
    (see `LogTail`). Lines that cannot be written, for example because the disk is full, are dropped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{process}.log").open("ab", buffering=0) as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Replacing the file descriptors, not sys.stdout, also captures what native code prints.
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # A user's function may print what a model wrote, and must not fail because its output cannot be written.
    protect_output(report_lost_output)

    # These keys are not context variables, because a context variable set here is only visible to the current task.
    def bind(logger: Any, name: str, event: EventDict) -> EventDict:
        return {"run": run, "process": process, **event}

    _configure(_DroppingFileHandler(logs / f"{process}.jsonl"), "json", bind)


def _configure(handler: logging.Handler, log_format: Literal["console", "json"], *first: Processor) -> None:
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_common(*first),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler.setFormatter(_formatter(log_format, *first))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OWN:
        logging.getLogger(name).setLevel(logging.INFO)


def _common(*first: Processor) -> list[Processor]:
    """Return the processors of every line, whichever logger and format it has."""
    return [
        *first,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _formatter(log_format: Literal["console", "json"], *first: Processor) -> logging.Formatter:
    rendering: list[Processor] = [_sentence, _redact, _fit]
    if log_format == "json":
        rendering = [_TRACEBACKS, structlog.processors.JSONRenderer(), _redact]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_common(*first),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )


def _is_for_people(record: logging.LogRecord) -> bool:
    package = record.name.partition(".")[0]
    return not record.name.endswith(DETAILS) and (package not in CHATTY or record.levelno >= logging.ERROR)


def _sentence(logger: Any, name: str, event: EventDict) -> str:
    """Render a line for people, such as `Warning: weight write failed: timeout (engine engine-0, version 5)`.

    Facts that are None, and those that are bound to all lines of the task, are left out. Of an exception, only the last
    line is shown; the log file has its traceback.
    """
    severity = {"warning": "Warning: ", "error": "Error: ", "critical": "Error: "}.get(str(event["level"]), "")
    bound = structlog.contextvars.get_contextvars()
    facts = {
        key: value
        for key, value in event.items()
        if key not in _NOT_FACTS and value is not None and not (key in bound and bound[key] == value)
    }
    texts = [str(value) for key, value in facts.items() if key in _TEXTS]
    raised = sys.exc_info() if event.get("exc_info") is True else event.get("exc_info")
    if isinstance(raised, tuple) and raised[1] is not None:
        texts.append(f"{type(raised[1]).__name__}: {raised[1]}")
    others = [f"{key.replace('_', ' ')} {value}" for key, value in facts.items() if key not in _TEXTS]
    return (
        f"{severity}{event['event']}"
        + (f": {'; '.join(texts)}" if texts else "")
        + (f" ({', '.join(others)})" if others else "")
    )


def _redact(logger: Any, name: str, rendered: Any) -> Any:
    """Remove secrets from the finished line, wherever in it they are: a message of a library may quote a URL."""
    return redact_text(rendered)


def _fit(logger: Any, name: str, rendered: Any) -> Any:
    return fit_to_terminal(rendered, sys.stderr, indent=len("Warning: "))
