"""Windowed FIFO: finished groups are collected close to queue order, so that easy prompts do not crowd out hard ones.

Source: MiniMax Forge, arXiv 2605.26494, section 6.2.4. The *head* is the oldest group that is neither collected nor
dropped. A finished group may be collected while it lies within a window of W groups that begins at the head. Collecting
a younger group does not move the head, so at most W - 1 younger groups ever pass an older one.

    window 3, head 4:   4 unfinished | 5 collected | 6 finished: released | 7 finished: blocked

The paper leaves two points open. This implementation decides them as follows:

- *The window is anchored at the head.* A collected group keeps its position in the window until the head passes it.
  If the window covered the first W groups that are still present, it would refill itself and behave greedily.
- *The window ignores dropped groups.* A dropped or failed group counts as consumed, and the window extends by one
  position. W therefore counts unfinished and kept groups only, and heavy filtering does not shrink the window. Dropped
  groups are never trained, so the bound on bypasses (and with it the bound on staleness) is unchanged.

`HeadPolicy` limits how long a slow head may block the groups behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from miles_async.errors import WindowError

T = TypeVar("T")


class HeadAction(StrEnum):
    """What happens to a head that exceeds its deadline (`--head-deadline-action`)."""

    WAIT = "wait"
    """Nothing: the window waits for the head."""
    RECYCLE = "recycle"
    """The head is aborted, and its prompt is requeued for another attempt."""
    SALVAGE = "salvage"
    """The head is aborted, and its prompt is requeued with its tokens. Without tokens it is recycled."""


@dataclass(frozen=True, slots=True)
class HeadPolicy:
    """The deadline of the window's head.

    The window bounds how far other groups may get ahead of the head, so one stuck rollout stalls the trainer
    (torchtitan issue 4826 reports rollouts of 50 minutes).
    """

    deadline_seconds: float | None
    """Counted from the moment a group becomes the head, because only then do other groups wait for it."""
    action: HeadAction

    @property
    def active(self) -> bool:
        """Whether a slow head is ever aborted."""
        return self.deadline_seconds is not None and self.action is not HeadAction.WAIT


class _Finished(Generic[T]):
    """The outcome of a position whose group finished; a position without an outcome is unfinished."""

    __slots__ = ("group",)

    def __init__(self, group: T) -> None:
        self.group = group


# Sentinels with the type of a finished position, so that one dictionary holds all three outcomes. They are compared by
# identity and their `group` is never read.
_COLLECTED: _Finished[None] = _Finished(None)
_DROPPED: _Finished[None] = _Finished(None)


class FIFOWindow(Generic[T]):
    """Releases the finished groups of a stream in queue order, at most `window_size` positions past the head.

    The positions are the sequence numbers of the stream. A window of 1 is strict FIFO. Each call costs O(log n) at
    most. Memory is bounded by the number of positions past the head.

    Example::

        window = FIFOWindow(2)
        window.mark_completed(1, "b")
        window.mark_completed(2, "c")
        list(window.drain())            # ["b"]: position 2 lies outside the window [0, 2)
        window.mark_completed(0, "a")
        list(window.drain())            # ["a", "c"]: the head moved to 2

    Raises WindowError (a ValueError) if `window_size` is below 1, if a position is negative or ended twice, and for any
    use after `close`.
    """

    def __init__(self, window_size: int, *, first: int = 0) -> None:
        """`first` is the first position of a stream that is continued."""
        if window_size < 1:
            raise WindowError(f"window_size must be at least 1 (strict FIFO), got {window_size}")
        self.window_size = window_size
        self.head = first
        """The oldest position that is neither collected nor dropped."""
        self.blocked = 0
        """Number of finished groups outside the window."""
        self._end = first
        """First position outside the window: finished groups in [head, end) may be collected."""
        self._counted = 0
        """Positions in [head, end) that count against `window_size`: all but the dropped ones."""
        self._outcomes: dict[int, _Finished[T] | _Finished[None]] = {}
        """Finished, collected and dropped positions at or past the head."""
        self._ready: list[int] = []
        """Heap of finished positions inside the window."""
        self._closed = False
        self._extend()

    def mark_completed(self, position: int, group: T) -> None:
        """Record that the group at `position` finished and is kept."""
        self._check(position)
        self._outcomes[position] = _Finished(group)
        if position < self._end:
            heapq.heappush(self._ready, position)
        else:
            self.blocked += 1

    def drop(self, position: int) -> None:
        """Record that the group at `position` will never be collected; the window extends by one position instead."""
        self._check(position)
        self._outcomes[position] = _DROPPED
        # A position outside the window has not been counted yet; `_extend` will skip it.
        if position < self._end:
            self._counted -= 1
        self._advance()

    def drain(self) -> Iterator[T]:
        """Yield the groups that may be collected now, oldest first. Collecting one may release more groups."""
        if self._closed:
            raise WindowError("drain after close: the window no longer holds any group")
        return self._release()

    def _release(self) -> Iterator[T]:
        # A separate generator, so that `drain` raises at the call and not at the first iteration.
        while self._ready:
            position = heapq.heappop(self._ready)
            finished = self._outcomes[position]
            self._outcomes[position] = _COLLECTED
            # The head moves before the group is yielded: the caller may mark further positions between two yields.
            self._advance()
            yield finished.group  # type: ignore[misc]  # positions in _ready hold a _Finished[T]

    def close(self) -> list[T]:
        """Close the window and return the finished groups that it still holds, in queue order."""
        held = [
            outcome.group
            for _, outcome in sorted(self._outcomes.items())
            if outcome is not _COLLECTED and outcome is not _DROPPED
        ]
        self._outcomes.clear()
        self._ready.clear()
        self.blocked = 0
        self._closed = True
        return held  # type: ignore[return-value]  # every outcome but the two sentinels is a _Finished[T]

    def _check(self, position: int) -> None:
        if self._closed:
            raise WindowError(f"position {position} after close: the window takes no more groups")
        if position < 0:
            raise WindowError(f"position {position} is outside the stream, whose positions begin with 0")
        if position < self.head or position in self._outcomes:
            raise WindowError(f"position {position} was completed or dropped before; each position ends once")

    def _advance(self) -> None:
        """Move the head past collected and dropped positions, then extend the window."""
        while (outcome := self._outcomes.get(self.head)) is _COLLECTED or outcome is _DROPPED:
            del self._outcomes[self.head]
            # Dropped positions were uncounted when they were dropped.
            if self.head < self._end and outcome is _COLLECTED:
                self._counted -= 1
            self.head += 1
        self._extend()

    def _extend(self) -> None:
        """Add positions to the window until it holds `window_size` positions that are not dropped."""
        # The head overtakes the end of the window when a run of dropped positions lies directly behind it.
        self._end = max(self._end, self.head)
        while self._counted < self.window_size:
            outcome = self._outcomes.get(self._end)
            if outcome is not _DROPPED:
                self._counted += 1
                if outcome is not None:
                    # The position finished while it was outside the window.
                    heapq.heappush(self._ready, self._end)
                    self.blocked -= 1
            self._end += 1
