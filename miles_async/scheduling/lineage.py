"""Which weight versions the current weights descend from, after the learner was restored from a checkpoint.

    versions     0  1  2  3  4  5          the checkpoint holds version 2; versions 3 to 5 are rolled back
                       └──────── 6  7      version 6 has the weights of version 2

A restored learner never reuses a version number, because engines and tokens may carry the old one. Its weights get the
next number, but their age starts where the checkpoint was: version 1 is one update older than version 6, and versions 3
to 5 are not ancestors of it.

If a run trains several adapters, they share the numbers: each version belongs to one of them. The age of a version is
then the number of later versions of the same adapter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Rollback(NamedTuple):
    """The learner was restored: `restored` follows `kept`, and the versions between them are rolled back."""

    kept: int
    restored: int
    updates: int
    """Weight updates between the two: 0, or 1 if the checkpoint was written between two versions."""


class Lineage:
    """The rollbacks of a run, oldest first. Without rollbacks, the age of a version is a plain difference."""

    def __init__(self, rollbacks: Iterable[Sequence[int]] = (), versions: Iterable[int] | None = None) -> None:
        """`versions` are the numbers that belong to this lineage, in order. None means all: the run has no other."""
        self.rollbacks = [Rollback(*values) for values in rollbacks]
        self._versions = None if versions is None else list(versions)

    def values(self) -> dict[str, Any]:
        """Return the arguments of another equal lineage, ready for JSON."""
        return {"rollbacks": [list(rollback) for rollback in self.rollbacks], "versions": self._versions}

    def announce(self, version: int) -> None:
        """Let the next version belong to this lineage. Does nothing if it does so already."""
        if self._versions is not None and (not self._versions or self._versions[-1] < version):
            self._versions.append(version)

    def newest(self, highest: int, count: int = 1) -> Sequence[int]:
        """Return the newest `count` versions of this lineage up to `highest`, in order; fewer if there are fewer."""
        if self._versions is None:
            return range(max(0, highest - count + 1), highest + 1)
        end = bisect_right(self._versions, highest)
        return self._versions[max(0, end - count) : end]

    def roll_back(self, kept: int, restored: int, updates: int) -> None:
        """Record that the weights of `restored`, the next version, come from a checkpoint; see `Rollback`."""
        # An earlier rollback whose restored version is rolled back now no longer lies on the way to the root.
        self.rollbacks = [earlier for earlier in self.rollbacks if earlier.restored <= kept]
        self.rollbacks.append(Rollback(kept, restored, updates))
        self.announce(restored)

    def includes(self, version: int) -> bool:
        """Whether the current weights descend from `version`."""
        return not any(rollback.kept < version < rollback.restored for rollback in self.rollbacks)

    def oldest_age(self, versions: Iterable[int], current: int) -> int:
        """The highest age of these versions; see `age`."""
        return max(self.age(version, current) for version in versions)

    def age(self, version: int, current: int) -> int:
        """Number of updates that lead from `version` to the version `current`.

        A version that was rolled back counts every version since then. Raises ValueError if `version` is newer than
        `current`, which is a bug.
        """
        if version > current:
            raise ValueError(f"tokens of version {version} before the trainer staged it: its version is {current}")
        age = self._between(version, current)
        if not self.includes(version):
            return age
        return age - sum(
            self._between(kept, restored) - updates
            for kept, restored, updates in self.rollbacks
            if version <= kept and restored <= current
        )

    def _between(self, version: int, later: int) -> int:
        """Number of versions of this lineage after `version`, up to `later`."""
        if self._versions is None:
            return later - version
        return bisect_right(self._versions, later) - bisect_right(self._versions, version)
