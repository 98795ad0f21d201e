"""The log file of a server, without secrets.

A server logs its arguments and its environment when it starts or fails. Its output therefore goes through a pipe to a
thread of the process that owns the server, which removes secrets from each line and appends the line to the file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from miles_async.config.redaction import redact_text


class RedactedLog:
    """Appends what is written to `descriptor` to a file, without `secrets` and credentials in URLs."""

    def __init__(self, path: Path, secrets: Collection[str]) -> None:
        self._path = path
        self._secrets = secrets
        reader, self.descriptor = os.pipe()
        """Standard output of the server. This process closes its copy with `close_writer`."""
        self._thread = threading.Thread(target=self._copy, args=(reader,), name=f"log-{path.stem}", daemon=True)
        self._thread.start()

    def close_writer(self) -> None:
        """Close this process's copy of `descriptor`: the log ends when the last process that writes to it has ended."""
        os.close(self.descriptor)

    def finish(self, within: float) -> None:
        """Wait until all output is in the file, at most `within` seconds."""
        self._thread.join(within)

    def _copy(self, reader: int) -> None:
        with open(reader, "rb") as lines, self._path.open("ab", buffering=0) as file:
            for line in lines:
                text = redact_text(line.decode(errors="surrogateescape"), self._secrets)
                # If the disk is full, the server must go on without its log instead of waiting for this thread.
                with suppress(OSError):
                    file.write(text.encode(errors="surrogateescape"))
