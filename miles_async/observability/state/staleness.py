"""The staleness of groups, and the parts it consists of.

The staleness of a group is the learner's weight version minus the oldest weight version of its tokens. When the batch
of the group enters its training step, the staleness is the sum of three parts:

    publish_lag   versions by which the learner was ahead of the engines when generation of the group began
    sampling      versions staged while the group was generated
    waiting       versions staged while the group was rewarded, held back by the window, queued and leased
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from typing import NamedTuple

from miles_async.events import GroupGenerated, StepStarted
from miles_async.observability.state.learner import Step

REMEMBERED_VERSIONS = 1024


class Part(NamedTuple):
    """One part of a group's staleness."""

    name: str
    """`publish_lag`, `sampling` or `waiting`."""
    versions: int
    seconds: float


class _Versions:
    """When the last versions of an adapter, or of a run that does not train several, were staged."""

    def __init__(self, *, numbered: bool) -> None:
        """`numbered` versions are all numbers from 0 on. Others are some of them, and are counted."""
        self._staged_at: deque[float] = deque(maxlen=REMEMBERED_VERSIONS)
        """When each of the last versions was first reported, oldest first. The last element belongs to `newest`."""
        self.newest = -1
        """The newest version."""
        self._numbers: deque[int] | None = None if numbered else deque(maxlen=REMEMBERED_VERSIONS)
        """The numbers of the last versions, oldest first."""

    def record(self, version: int, now: float) -> None:
        if self._numbers is not None:
            if not self._numbers or self._numbers[-1] < version:
                self._numbers.append(version)
                self._staged_at.append(now)
                self.newest += 1
            return
        while self.newest < version:
            self.newest += 1
            self._staged_at.append(now)

    def count(self, version: int) -> int:
        """The number of versions before this one."""
        if self._numbers is None:
            return version
        return self.newest - len(self._numbers) + bisect_right(self._numbers, version)

    def at(self, time: float) -> int:
        """Return the version at `time`, or the oldest remembered version if `time` is earlier."""
        return self.newest - len(self._staged_at) + max(1, bisect_right(self._staged_at, time))

    def staged(self, version: int) -> float | None:
        """Return when `version` was staged; None if it is not staged yet or no longer remembered."""
        index = version - (self.newest - len(self._staged_at) + 1)
        return self._staged_at[index] if 0 <= index < len(self._staged_at) else None


class Staleness:
    """Remembers when the last versions were staged, and counts the ages of trained groups."""

    def __init__(self) -> None:
        self._versions: dict[str, _Versions] = {}
        """By adapter; the name is empty unless the run trains several."""
        self.trained: Counter[int] = Counter()
        """Number of trained groups by their staleness in versions, without those of steps that were undone."""

    def count(self, step: Step) -> None:
        """Count the groups of a step, unless the step was skipped because it was not finite."""
        if step.finite:
            self.trained.update(dict(step.ages))

    def undo(self, step: Step) -> None:
        """Take back what `count` has counted."""
        if step.finite:
            self.trained -= Counter(dict(step.ages))

    def record_version(self, version: int, now: float, adapter: str = "") -> None:
        self._of(adapter).record(version, now)

    def age(self, generated: GroupGenerated, now: float) -> tuple[int, float]:
        """Return the age of a group in versions and in seconds."""
        versions = self._of(generated.adapter)
        return versions.newest - versions.count(generated.versions[0]), now - generated.started

    def parts(self, generated: GroupGenerated, step: StepStarted) -> list[Part]:
        """Return the three parts for a group of the batch."""
        versions = self._of(step.adapter)
        started, ended, oldest = generated.started, generated.generated, versions.count(generated.versions[0])
        # Between its start and its first token a group may wait for a request permit or for the end of a pause. Its
        # tokens can then be newer than the version at its start, hence the maximum.
        at_start, at_end = max(versions.at(started), oldest), versions.at(ended)
        # If the group continues tokens of an earlier attempt, all versions before this attempt count as publish lag.
        behind_since = versions.staged(oldest + 1)
        lag = max(0.0, started - behind_since) if behind_since is not None else 0.0
        return [
            Part("publish_lag", at_start - oldest, lag),
            Part("sampling", at_end - at_start, ended - started),
            Part("waiting", versions.count(step.version) - at_end, step.time - ended),
        ]

    def _of(self, adapter: str) -> _Versions:
        if adapter not in self._versions:
            self._versions[adapter] = _Versions(numbered=not adapter)
        return self._versions[adapter]
