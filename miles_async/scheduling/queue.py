"""The bounded queue between rollout and trainer, with the capacity `--queue-capacity` (1000 groups by default).

The queue never drops a group and never blocks. Admission reserves room for a group before its first token is sampled,
so a put into a full queue is a bug in the scheduler and raises LedgerError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from miles_async.errors import LedgerError

T = TypeVar("T")


class GroupQueue(deque[T]):
    """First in, first out: `put` and `popleft` are O(1), and `sweep` is O(n).

    `extend` appends the groups of a stored run, which may exceed the capacity: those of undone batches are among them.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def put(self, group: T) -> None:
        """Append a group. Raises LedgerError if the queue is full."""
        if len(self) >= self.capacity:
            raise LedgerError(
                f"the queue is full: it holds {self.capacity} groups, so admission let in too many; report this bug"
            )
        self.append(group)

    def sweep(self, rejects: Callable[[T], bool]) -> list[T]:
        """Remove and return the groups for which `rejects` is true; the other groups keep their order."""
        groups = [(group, rejects(group)) for group in self]
        self.clear()
        self.extend(group for group, rejected in groups if not rejected)
        return [group for group, rejected in groups if rejected]
