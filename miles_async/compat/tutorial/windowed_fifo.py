"""The window under the name and the arguments of the tutorial on windowed FIFO."""

from __future__ import annotations

from typing import TypeVar

from miles_async.errors import WindowError
from miles_async.scheduling.window import FIFOWindow

T = TypeVar("T")


class WindowedFIFOCollector(FIFOWindow[T]):
    """A window over one batch of `total` groups, whose positions are counted from 0; with `total=None`, over a stream.

    A window of 1 is strict FIFO; a window of `total` is greedy. Example::

        window = WindowedFIFOCollector(total=4, window_size=2)
        window.mark_completed(1, "b")
        window.mark_completed(2, "c")
        list(window.drain())            # ["b"]: position 2 lies outside the window [0, 2)
        window.mark_completed(0, "a")
        list(window.drain())            # ["a", "c"]: the head moved to 2

    In addition to the errors of `FIFOWindow`, raises WindowError if `total` is below 1 or a position is not below it.
    """

    def __init__(self, total: int | None, window_size: int) -> None:
        if total is not None and total < 1:
            raise WindowError(f"total must be at least 1, got {total}: a batch has at least one group")
        super().__init__(window_size)
        self.total = total

    @property
    def exhausted(self) -> bool:
        """Whether every position of the batch is collected or dropped."""
        return self.head == self.total

    def mark_completed(self, position: int, group: T) -> None:
        self._check_total(position)
        super().mark_completed(position, group)

    def drop(self, position: int) -> None:
        self._check_total(position)
        super().drop(position)

    def _check_total(self, position: int) -> None:
        if self.total is not None and position >= self.total:
            raise WindowError(f"position {position} is outside the batch of {self.total} groups")
