"""Which weight versions the current weights descend from, after the learner was restored from a checkpoint.

    versions     0  1  2  3  4  5          the checkpoint holds version 2; versions 3 to 5 are rolled back
                       └──────── 6  7      version 6 has the weights of version 2

A restored learner never reuses a version number, because engines and tokens may carry the old one. Its weights get the
next number, but their age starts where the checkpoint was: version 1 is one update older than version 6, and versions 3
to 5 are not ancestors of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Rollback(NamedTuple):
    """The learner was restored: `restored` follows `kept`, and the versions between them are rolled back."""

    kept: int
    restored: int
    updates: int
    """Weight updates between the two: 0, or 1 if the checkpoint was written between two versions."""


class Lineage:
    """The rollbacks of a run, oldest first. Without rollbacks, the age of a version is a plain difference."""

    def __init__(self, rollbacks: Iterable[Sequence[int]] = ()) -> None:
        self.rollbacks = [Rollback(*values) for values in rollbacks]

    def roll_back(self, kept: int, restored: int, updates: int) -> None:
        """Record that the weights of `restored`, the next version, come from a checkpoint; see `Rollback`."""
        # An earlier rollback whose restored version is rolled back now no longer lies on the way to the root.
        self.rollbacks = [earlier for earlier in self.rollbacks if earlier.restored <= kept]
        self.rollbacks.append(Rollback(kept, restored, updates))

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
        if not self.includes(version):
            return current - version
        return (
            current
            - version
            - sum(
                restored - kept - updates
                for kept, restored, updates in self.rollbacks
                if version <= kept and restored <= current
            )
        )
