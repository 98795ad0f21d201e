"""The bounded queue between rollout and trainer (seed `fully-async`: capped at 1000 groups).

It never drops and never blocks: admission reserves a group's room before its first token is sampled, so a put into a
full queue is a bug in the scheduler and says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from miles_async.errors import LedgerError

T = TypeVar("T")


class GroupQueue(Generic[T]):
    """First in, first out; put and get are O(1), a sweep is O(n)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._groups: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: T) -> None:
        if len(self._groups) >= self.capacity:
            raise LedgerError(f"the queue holds {self.capacity} groups and is full: admission let one in too many")
        self._groups.append(group)

    def get(self) -> T:
        """The oldest group. Raises IndexError when empty."""
        return self._groups.popleft()

    def sweep(self, hopeless: Callable[[T], bool]) -> list[T]:
        """Take out, and return, the groups of which `hopeless` is true; the rest keep their order."""
        swept = [group for group in self._groups if hopeless(group)]
        if swept:
            self._groups = deque(group for group in self._groups if not hopeless(group))
        return swept
