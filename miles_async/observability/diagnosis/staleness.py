"""The staleness of groups, and the parts it consists of.

The staleness of a group is the learner's weight version minus the oldest weight version of its tokens. When the batch
of the group enters its training step, the staleness is the sum of three parts:

    publish_lag   versions by which the learner was ahead of the engines when generation of the group began
    sampling      versions staged while the group was generated
    waiting       versions staged while the group was rewarded, held back by the window, queued and leased
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from miles_async.events import GroupGenerated, StepStarted

REMEMBERED_VERSIONS = 1024


class Part(NamedTuple):
    """One part of a group's staleness."""

    name: str
    """`publish_lag`, `sampling` or `waiting`."""
    versions: int
    seconds: float


class _Generated(NamedTuple):
    started: float
    ended: float
    oldest: int


class StalenessTracker:
    """Remembers when groups were generated and when the last versions were staged."""

    def __init__(self) -> None:
        self._groups: dict[int, _Generated] = {}
        self._staged_at: deque[float] = deque(maxlen=REMEMBERED_VERSIONS)
        """When each of the last versions was first reported, oldest first. The last element belongs to `version`."""
        self.version = -1
        """The learner's weight version."""

    def record_version(self, version: int, now: float) -> None:
        while self.version < version:
            self.version += 1
            self._staged_at.append(now)

    def record_generation(self, event: GroupGenerated) -> None:
        self._groups[event.sequence] = _Generated(event.started, event.generated, event.versions[0])

    def forget(self, sequence: int) -> None:
        self._groups.pop(sequence, None)

    def age(self, sequence: int, now: float) -> tuple[int, float] | None:
        """Return the age of a group in versions and in seconds; None if its generation was not recorded."""
        group = self._groups.get(sequence)
        return (self.version - group.oldest, now - group.started) if group is not None else None

    def parts(self, step: StepStarted) -> list[Part]:
        """Return the three parts for each group of the batch, in the order of the batch."""
        return [
            part
            for sequence in step.groups
            if (group := self._groups.get(sequence))
            for part in self._parts(group, step)
        ]

    def _parts(self, group: _Generated, step: StepStarted) -> list[Part]:
        # Between its start and its first token a group may wait for a request permit or for the end of a pause. Its
        # tokens can then be newer than the version at its start, hence the maximum.
        at_start, at_end = max(self._version_at(group.started), group.oldest), self._version_at(group.ended)
        # If the group continues tokens of an earlier attempt, all versions before this attempt count as publish lag.
        behind_since = self._when_staged(group.oldest + 1)
        lag = max(0.0, group.started - behind_since) if behind_since is not None else 0.0
        return [
            Part("publish_lag", at_start - group.oldest, lag),
            Part("sampling", at_end - at_start, group.ended - group.started),
            Part("waiting", step.version - at_end, step.time - group.ended),
        ]

    def _version_at(self, time: float) -> int:
        """Return the learner's version at `time`, or the oldest remembered version if `time` is earlier."""
        return self.version - len(self._staged_at) + max(1, bisect_right(self._staged_at, time))

    def _when_staged(self, version: int) -> float | None:
        """Return when `version` was staged; None if it is not staged yet or no longer remembered."""
        index = version - (self.version - len(self._staged_at) + 1)
        return self._staged_at[index] if 0 <= index < len(self._staged_at) else None
