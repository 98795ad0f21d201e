"""The dead-letter file: groups that failed or became too stale in every attempt, as one JSON object per line."""

from __future__ import annotations

from pathlib import Path

import orjson

from miles_async.types import DropReason, Group


class DeadLetterFile:
    """Implements the `DeadLetters` port by appending to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        """Append the group with the reason and the error of its last attempt.

        The file is opened and closed for each line, so that the line is complete even if this group kills the run.
        """
        values = group.to_dict()
        line = {
            "feed_index": values["feed_index"],
            "attempts": values["attempt"] + 1,
            "reason": reason,
            "error": error,
            "samples": values["samples"],
        }
        with self._path.open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")
