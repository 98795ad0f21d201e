"""The output of child processes, without secrets and as visible text.

A server logs its arguments and its environment when it starts or fails, and programs of others log what a model wrote.
Their output therefore goes through a pipe to a thread of the process that started them, which appends it line by line
to a file.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO

from miles_async.config.redaction import redact_text
from miles_async.visible_text import visible_text

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Sequences that set colours and fonts. The router writes them to files, too."""


class RedactedLog:
    """Appends what is written to `descriptor` to a file, without `secrets` and credentials in URLs."""

    def __init__(self, file: FileIO, secrets: Collection[str] = ()) -> None:
        """`file` is closed at the end of the output."""
        self._file = file
        self._secrets = secrets
        reader, self.descriptor = os.pipe()
        """Standard output or standard error of a child. This process closes its copy with `close_writer`."""
        self._thread = threading.Thread(target=self._copy, args=(reader,), name="redacted-log", daemon=True)
        self._thread.start()

    def close_writer(self) -> None:
        """Close this process's copy of `descriptor`: the log ends when the last process that writes to it has ended."""
        os.close(self.descriptor)

    def finish(self, within: float) -> None:
        """Wait until all output is in the file, at most `within` seconds."""
        self._thread.join(within)

    def _copy(self, reader: int) -> None:
        with open(reader, "rb") as lines, self._file as file:
            for line in lines:
                text = _COLOURS.sub("", line.decode(errors="backslashreplace"))
                # If the disk is full, the server must go on without its log instead of waiting for this thread.
                with suppress(OSError):
                    file.write(visible_text(redact_text(text, self._secrets)).encode())


@contextmanager
def child_stderr(secrets: Collection[str] = (), *, finish_within: float = 0.0) -> Iterator[int]:
    """Inside the block, yield a descriptor for the standard error of a child process that is started there.

    The output goes to standard error of this process: a terminal, or the log file of a worker. At the end of the block,
    this function waits at most `finish_within` seconds until all output has been written there.
    """
    log = RedactedLog(FileIO(os.dup(2), "wb"), secrets)
    try:
        yield log.descriptor
    finally:
        log.close_writer()
        log.finish(finish_within)
