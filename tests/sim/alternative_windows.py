"""Windows that the windowed FIFO collector is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from miles_async.scheduling.window import FIFOWindow
from miles_async.types import Group

UNBOUNDED = 4096
"""A window that no scenario ever fills: greedy collection."""


class PlainWindow(FIFOWindow[Group]):
    """Dropped groups keep their place, and the filter speaks when a group is collected, in window order.

    This is the window of MiniMax Forge (arXiv 2605.26494, 6.2.4) to the letter: a group that the filter will drop takes
    room in the window and keeps its slot, although it never becomes part of a batch.
    """

    def __init__(self, window_size: int, keep: Callable[[Group], bool], filtered: Callable[[Group], None]) -> None:
        super().__init__(window_size)
        self._keep = keep
        self._filtered = filtered

    def drop(self, position: int) -> None:
        self.mark_completed(position, cast("Group", None))

    def drain(self) -> Iterator[Group]:
        for group in super().drain():
            if group is None:
                continue
            if self._keep(group):
                yield group
            else:
                self._filtered(group)
