"""The standard streams of this project's programs: text of others cannot steer a terminal, lost output is dropped.

Every program calls `protect_output` first. What it prints afterwards, including tracebacks, warnings, messages of
argparse and lines of other libraries, reaches the terminal or the log file as visible text.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from miles_async.visible_text import visible_text


class LossyFile(io.FileIO):
    """A file that discards its output from the first failed write on.

    The file descriptor itself then refers to /dev/null, so that native code and child processes can also write to it.
    Output is lost if a terminal is closed, or if the reader of a pipe ends.
    """

    def __init__(self, descriptor: int) -> None:
        """Closing this object leaves the descriptor open."""
        super().__init__(descriptor, "wb", closefd=False)
        self.on_loss: Callable[[OSError], None] | None = None
        """Called once, with the error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.on_loss is not None:
                self.on_loss(error)
            return memoryview(data).nbytes


class VisibleOutput(io.TextIOWrapper):
    """A stream that writes visible text to the descriptor of another stream, and never raises OSError."""

    def __init__(self, stream: TextIO) -> None:
        """Raises io.UnsupportedOperation if `stream` has no descriptor."""
        stream.flush()
        self.file = LossyFile(stream.fileno())
        # With PYTHONUNBUFFERED, streams write through instead of buffering lines. A progress bar relies on either.
        unbuffered = isinstance(stream, io.TextIOWrapper) and stream.write_through
        super().__init__(
            io.BufferedWriter(self.file),
            stream.encoding,
            # Visible text may have symbols that the encoding of the terminal lacks.
            errors="backslashreplace",
            line_buffering=bool(stream.line_buffering) or unbuffered,
        )
        self.controls = Controls(self)

    def write(self, text: str) -> int:
        super().write(visible_text(text))
        return len(text)


class Controls:
    """A `VisibleOutput` for the parts of this project that move the cursor: it writes control characters, too."""

    def __init__(self, stream: VisibleOutput) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def protect_output(on_loss: Callable[[OSError], None] | None = None) -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that write visible text and discard what cannot be written.

    `on_loss` is called once if standard output is lost, with the error. Streams without a descriptor, such as those of
    a notebook, stay.
    """
    sys.stdout, sys.stderr = protected(sys.stdout), protected(sys.stderr)
    if isinstance(sys.stdout, VisibleOutput):
        sys.stdout.file.on_loss = on_loss


def protected(stream: TextIO) -> TextIO:
    """Return a `VisibleOutput` in place of a stream, or the stream itself if it is one or has no descriptor."""
    if isinstance(stream, VisibleOutput):
        return stream
    try:
        return VisibleOutput(stream)
    except io.UnsupportedOperation:
        return stream


def controls_of(stream: TextIO) -> Any:
    """Return what writes control characters to a stream: the stream itself unless it is a `VisibleOutput`."""
    return stream.controls if isinstance(stream, VisibleOutput) else stream
