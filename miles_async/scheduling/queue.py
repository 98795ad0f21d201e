"""The bounded queue between rollout and trainer, with the capacity `--queue-capacity` (1000 groups by default).

The queue never drops a group and never blocks. Admission reserves room for a group before its first token is sampled,
so a put into a full queue is a bug in the scheduler and raises LedgerError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from miles_async.errors import LedgerError

T = TypeVar("T")


class GroupQueue(Generic[T]):
    """First in, first out. `put` and `get` are O(1); `sweep` is O(n)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._groups: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[T]:
        """The groups, the oldest first."""
        return iter(self._groups)

    def put(self, group: T) -> None:
        """Append a group. Raises LedgerError if the queue is full."""
        if len(self._groups) >= self.capacity:
            raise LedgerError(
                f"the queue is full: it holds {self.capacity} groups, so admission let in too many; report this bug"
            )
        self._groups.append(group)

    def restore(self, groups: Iterable[T]) -> None:
        """Append the groups of a stored run, which may exceed the capacity: groups of undone batches are among them."""
        self._groups.extend(groups)

    def get(self) -> T:
        """Remove and return the oldest group. Raises IndexError if the queue is empty."""
        return self._groups.popleft()

    def sweep(self, rejects: Callable[[T], bool]) -> list[T]:
        """Remove and return the groups for which `rejects` is true; the other groups keep their order."""
        swept = [group for group in self._groups if rejects(group)]
        if swept:
            self._groups = deque(group for group in self._groups if not rejects(group))
        return swept
