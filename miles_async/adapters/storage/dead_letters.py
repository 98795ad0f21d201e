"""The dead-letter file: prompts that failed or aged in every attempt, one JSON object per line, with the reason."""

from __future__ import annotations

from pathlib import Path

import orjson

from miles_async.types import DropReason, Group


class DeadLetterFile:
    """The `DeadLetters` port. A line is flushed when it is written: what killed the run may be in it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        line = orjson.dumps(
            {
                "feed_index": group.feed_index,
                "attempts": group.attempt + 1,
                "reason": reason,
                "error": error,
                "samples": [sample.to_dict() for sample in group],
            },
            default=str,
        )
        with self._path.open("ab") as file:
            file.write(line + b"\n")
