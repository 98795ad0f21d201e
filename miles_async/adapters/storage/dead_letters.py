"""The dead-letter file: groups that failed or became too stale in every attempt, as one JSON object per line."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import orjson

from miles_async.events import DeadLettered, DeadLettersUnwritten, EventSink
from miles_async.types import DropReason, Group
from miles_async.visible_text import visible_json

MAX_COMPLETE_BYTES = 64 << 20
"""Most bytes of complete letters that are kept in memory. Beyond it, letters are kept without their samples, in some
hundred bytes each; the feed index identifies the prompt in the data."""
MAX_ERROR_CHARACTERS = 500
"""Most characters of the error message in a letter that is kept without its samples."""
RETRY_SECONDS = 10.0
NAMED = 100
"""Most prompts that an event names."""


class DeadLetterFile:
    """Implements the `DeadLetters` port by appending to `path`.

    No letter is lost if the file cannot be written, for example because the disk is full: letters stay in memory until
    they are written together with a later letter, by `retry_forever` or by `retry`.
    """

    def __init__(self, path: Path, events: EventSink) -> None:
        self._path = path
        self._events = events
        self._unwritten: deque[tuple[str, bytes]] = deque()
        """Feed index and line of each letter that is not written yet, oldest first."""
        self._unwritten_bytes = 0
        self._reported = 0
        """Number of unwritten letters in the last event."""

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        """Append the group with the reason and the error of its last attempt.

        The file is opened and closed for each letter, so that the line is complete even if this group kills the run.
        """
        letter = {
            "feed_index": group.feed_index,
            "attempts": group.attempt + 1,
            "reason": reason,
            "error": error,
            "samples": [sample.to_dict() for sample in group],
        }
        self._events.emit(DeadLettered(time=time.time(), feed_index=group.feed_index, reason=reason))
        self._keep(group.feed_index, visible_json(orjson.dumps(letter)) + b"\n")
        self.retry()
        if self._unwritten_bytes > MAX_COMPLETE_BYTES:
            feed_index, line = self._unwritten.pop()
            self._unwritten_bytes -= len(line)
            short = letter | {"error": error[:MAX_ERROR_CHARACTERS], "samples": None}
            self._keep(feed_index, visible_json(orjson.dumps(short)) + b"\n")

    def retry(self) -> None:
        """Write all letters that are in memory. Those that cannot be written stay in memory."""
        failure = None
        try:
            while self._unwritten:
                _append(self._path, self._unwritten[0][1])
                _, line = self._unwritten.popleft()
                self._unwritten_bytes -= len(line)
        except OSError as error:
            failure = error.strerror
        if len(self._unwritten) != self._reported:
            self._reported = len(self._unwritten)
            prompts = [feed_index for feed_index, _ in list(self._unwritten)[:NAMED]]
            self._events.emit(
                DeadLettersUnwritten(time=time.time(), letters=self._reported, prompts=prompts, error=failure)
            )

    async def retry_forever(self) -> None:
        """Write letters that are in memory every `RETRY_SECONDS`."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            self.retry()

    def _keep(self, feed_index: str, line: bytes) -> None:
        self._unwritten.append((feed_index, line))
        self._unwritten_bytes += len(line)


def _append(path: Path, line: bytes) -> None:
    """Append a line. Raises OSError if it cannot be written completely; the file is then unchanged."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise
