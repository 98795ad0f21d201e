"""How stale groups are, and what their staleness is made of: a fold over the event stream.

When its batch enters the step, a group is `trainer version - oldest version` versions old. Three parts add up to that:

    publish_lag   versions the trainer was ahead of the engines when the group's generation began
    sampling      versions staged while it was generated
    waiting       versions staged while it was rewarded, held back by the window, queued and leased
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from miles_async.events import GroupGenerated, StepStarted

REMEMBERED_VERSIONS = 1024


class Part(NamedTuple):
    name: str
    versions: int
    seconds: float


class _Generated(NamedTuple):
    started: float
    ended: float
    oldest: int


class StalenessTracker:
    """Groups between generation and their end, and when the last versions were staged."""

    def __init__(self) -> None:
        self._groups: dict[int, _Generated] = {}
        self._staged_at: deque[float] = deque(maxlen=REMEMBERED_VERSIONS)
        """When each of the last versions was first heard of, oldest first."""
        self.version = -1
        """The trainer's."""

    def record_version(self, version: int, now: float) -> None:
        while self.version < version:
            self.version += 1
            self._staged_at.append(now)

    def record_generation(self, event: GroupGenerated) -> None:
        self._groups[event.sequence] = _Generated(event.started, event.generated, event.versions[0])

    def forget(self, sequence: int) -> None:
        self._groups.pop(sequence, None)

    def age(self, sequence: int, now: float) -> tuple[int, float] | None:
        """Versions and seconds of age now; None where the group was generated elsewhere."""
        group = self._groups.get(sequence)
        return (self.version - group.oldest, now - group.started) if group is not None else None

    def parts(self, step: StepStarted) -> list[Part]:
        """Of every group in the batch, one after the other."""
        return [
            part
            for sequence in step.groups
            if (group := self._groups.get(sequence))
            for part in self._parts(group, step)
        ]

    def _parts(self, group: _Generated, step: StepStarted) -> list[Part]:
        # A group may wait for a place, or out a pause, and be sampled from newer weights than there were when it began.
        at_start, at_end = max(self._version_at(group.started), group.oldest), self._version_at(group.ended)
        # Where a group continues tokens of an earlier attempt, all that happened before this one counts as lag.
        behind_since = self._when_staged(group.oldest + 1)
        lag = max(0.0, group.started - behind_since) if behind_since is not None else 0.0
        return [
            Part("publish_lag", at_start - group.oldest, lag),
            Part("sampling", at_end - at_start, group.ended - group.started),
            Part("waiting", step.version - at_end, step.time - group.ended),
        ]

    def _version_at(self, time: float) -> int:
        """The trainer's version at that time; the oldest remembered one where it is long ago."""
        return self.version - len(self._staged_at) + max(1, bisect_right(self._staged_at, time))

    def _when_staged(self, version: int) -> float | None:
        place = version - (self.version - len(self._staged_at) + 1)
        return self._staged_at[place] if 0 <= place < len(self._staged_at) else None
