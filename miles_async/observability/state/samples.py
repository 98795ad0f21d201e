"""The newest displayed samples with what became of them, in bounded memory."""

from __future__ import annotations

from typing import Any

import msgspec

from miles_async.events import Event, GroupMoved, SampleDisplayed, StepStarted, encode_json
from miles_async.scheduling.ledger import GroupState

MAX_SAMPLES = 64
MAX_BYTES = 512 * 1024
"""Most bytes of the samples as JSON. The oldest samples are removed first."""


class _Entry(msgspec.Struct):
    sample: SampleDisplayed
    size: int
    """Bytes as JSON."""
    trained: int | None = None
    """The trainer version of the step that trained the sample; None if it is not trained (yet)."""
    dropped: str | None = None
    """Why the group was dropped, if it was."""


class SampleLog:
    """Pass every event to `observe`; `newest` returns the samples."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        """By sequence number of the group, oldest first."""
        self._size = 0
        self.revision = 0
        """Changes whenever `newest` changes."""

    def observe(self, event: Event) -> None:
        match event:
            case SampleDisplayed():
                self._add(event)
            case StepStarted():
                for sequence in self._entries.keys() & event.groups:
                    self._entries[sequence].trained = event.version
                    self.revision += 1
            case GroupMoved():
                entry = self._entries.get(event.sequence)
                if entry is not None and event.after == GroupState.DROPPED:
                    entry.dropped = event.reason
                    self.revision += 1

    def _add(self, sample: SampleDisplayed) -> None:
        self._remove(sample.sequence)
        size = len(encode_json(sample))
        self._entries[sample.sequence] = _Entry(sample, size)
        self._size += size
        self.revision += 1
        while len(self._entries) > MAX_SAMPLES or (self._size > MAX_BYTES and len(self._entries) > 1):
            self._remove(next(iter(self._entries)))

    def _remove(self, sequence: int) -> None:
        if (entry := self._entries.pop(sequence, None)) is not None:
            self._size -= entry.size

    def newest(self) -> list[dict[str, Any]]:
        """Return the samples as plain values for JSON, newest first.

        The age of a token is `trained` minus the version of its segment.
        """
        return [
            {"trained": entry.trained, "dropped": entry.dropped, **msgspec.structs.asdict(entry.sample)}
            for entry in reversed(self._entries.values())
        ]
