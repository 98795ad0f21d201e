"""Lets this process survive the loss of its output: a closed terminal, or a pipe whose reader has ended."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import structlog

log = structlog.get_logger(__name__)


class LossyFile(io.FileIO):
    """A file that discards its output from the first failed write on.

    The file descriptor itself then refers to /dev/null, so that native code and child processes can also write to it.
    """

    def __init__(self, descriptor: int, on_loss: Callable[[OSError], None]) -> None:
        """`on_loss` is called once, with the error. Closing this object leaves the descriptor open."""
        super().__init__(descriptor, "wb", closefd=False)
        self._on_loss = on_loss

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self._on_loss(error)
            return memoryview(data).nbytes


def survive_lost_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by lossy streams."""

    def report(error: OSError) -> None:
        log.warning("standard output was lost and is discarded from now on", error=error.strerror)

    def ignore(error: OSError) -> None:
        """Without standard error there is no place for a log line; the run folder has the results."""

    sys.stdout = lossy_stream(sys.stdout, report)
    sys.stderr = lossy_stream(sys.stderr, ignore)


def lossy_stream(stream: TextIO, on_loss: Callable[[OSError], None]) -> TextIO:
    """Return a text stream that writes to the descriptor of `stream` and never raises OSError.

    A stream without a descriptor, such as that of a notebook or of captured output, is returned unchanged.
    """
    stream.flush()
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return stream
    buffer = io.BufferedWriter(LossyFile(descriptor, on_loss))
    # With PYTHONUNBUFFERED, streams write through instead of buffering lines. A progress bar relies on either.
    unbuffered = isinstance(stream, io.TextIOWrapper) and stream.write_through
    line_buffering = bool(stream.line_buffering) or unbuffered
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=line_buffering)
