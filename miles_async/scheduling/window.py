"""Windowed FIFO: collect finished groups near their queue order, so that easy prompts do not crowd out hard ones.

Source: the `windowed-fifo` seed (MiniMax Forge, arXiv 2605.26494, section 6.2.4). A finished group may be collected
while fewer than W groups lie between the *head* and it; the head is the oldest group not yet collected or dropped.
Collecting a younger group does not move the head, so at most W - 1 younger groups ever pass an older one.

    window 3, head 4:   4 unfinished | 5 collected | 6 finished -> may go | 7 finished -> blocked

Two refinements the seed leaves open:

- *Anchored.* Collected groups keep counting until the head passes them. A window over the first W groups still present
  refills itself and is greedy in effect.
- *Drop-aware.* A dropped or failed group counts as consumed and gives its place back: W counts survivors and the
  unfinished, so that heavy filtering does not shrink the window. Dropped groups are never trained, so the bound on
  bypasses, and with it the bound on age, stays what it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from miles_async.errors import WindowError

T = TypeVar("T")


class _Place(Generic[T]):
    """What became of one position; a position without a place is unfinished."""

    __slots__ = ("group",)

    def __init__(self, group: T) -> None:
        self.group = group


_COLLECTED: _Place[None] = _Place(None)
_DROPPED: _Place[None] = _Place(None)


class WindowedFIFOCollector(Generic[T]):
    """Releases finished groups in queue order, at most `window_size` places past the oldest outstanding one.

    `total` is the number of positions of a batch, counted from 0; None makes the unbounded stream form, whose positions
    are sequence numbers. A window of 1 is strict FIFO; a window of `total` is greedy. Each call costs O(log n) at most;
    memory is bounded by what lies past the head.

    Raises WindowError (a ValueError) for a window or total below 1, a position that is negative, out of range, or
    completed or dropped twice, and for any use after `close`.
    """

    def __init__(self, total: int | None, window_size: int) -> None:
        if total is not None and total < 1:
            raise WindowError(f"total must be at least 1, got {total}: there is nothing to collect")
        if window_size < 1:
            raise WindowError(f"window_size must be at least 1 (strict FIFO), got {window_size}")
        self.total = total
        self.window_size = window_size
        self.head = 0
        """The oldest position neither collected nor dropped."""
        self.blocked = 0
        """Finished groups that the window holds back."""
        self._edge = 0
        """First position past the window: everything in [head, edge) may be collected once finished."""
        self._counted = 0
        """Positions in [head, edge) that take up a place, that is, all but the dropped ones."""
        self._permits: dict[int, _Place[T] | _Place[None]] = {}
        self._ready: list[int] = []
        self._closed = False
        self._extend()

    def mark_completed(self, position: int, group: T) -> None:
        """Record that the group at `position` finished and is kept."""
        self._check(position)
        self._permits[position] = _Place(group)
        if position < self._edge:
            heapq.heappush(self._ready, position)
        else:
            self.blocked += 1

    def drop(self, position: int) -> None:
        """Record that the group at `position` will never be collected; its place goes to the next in line."""
        self._check(position)
        self._permits[position] = _DROPPED
        if position < self._edge:
            self._counted -= 1
        self._advance()

    def drain(self) -> Iterator[T]:
        """Yield what may be collected now, oldest first. Each yield may open the window for the next."""
        if self._closed:
            raise WindowError("drain after close: the window no longer holds any group")
        return self._release()

    def _release(self) -> Iterator[T]:
        while self._ready:
            position = heapq.heappop(self._ready)
            place = self._permits[position]
            self._permits[position] = _COLLECTED
            self._advance()
            yield place.group  # type: ignore[misc]  # positions in _ready hold a _Place[T]

    def close(self) -> list[T]:
        """End the window and hand out every finished group it still holds, in queue order."""
        held = [
            place.group
            for _, place in sorted(self._permits.items())
            if place is not _COLLECTED and place is not _DROPPED
        ]
        self._permits.clear()
        self._ready.clear()
        self.blocked = 0
        self._closed = True
        return held  # type: ignore[return-value]  # what is neither collected nor dropped is a _Place[T]

    @property
    def exhausted(self) -> bool:
        """Whether every position of a finite window is collected or dropped."""
        return self.head == self.total

    def _check(self, position: int) -> None:
        if self._closed:
            raise WindowError(f"position {position} after close: the window takes no more groups")
        if position < 0 or (self.total is not None and position >= self.total):
            raise WindowError(f"position {position} is outside [0, {self.total})")
        if position < self.head or position in self._permits:
            raise WindowError(f"position {position} was completed or dropped before; each position ends once")

    def _advance(self) -> None:
        """Move the head past what was collected or dropped, then let the window reach as far as it now may."""
        while (place := self._permits.get(self.head)) is _COLLECTED or place is _DROPPED:
            del self._permits[self.head]
            if self.head < self._edge and place is _COLLECTED:
                self._counted -= 1
            self.head += 1
        self._extend()

    def _extend(self) -> None:
        self._edge = max(self._edge, self.head)
        while self._counted < self.window_size and self._edge != self.total:
            place = self._permits.get(self._edge)
            if place is not _DROPPED:
                self._counted += 1
                if place is not None:
                    heapq.heappush(self._ready, self._edge)
                    self.blocked -= 1
            self._edge += 1
