"""What becomes of a group that cannot be trained: back to the feed for a fresh attempt, or buried with its reason."""

from __future__ import annotations

from collections import Counter

from miles_async.pipeline.run_state import RunState
from miles_async.ports import DataSource, DeadLetters
from miles_async.types import DropReason, Group

MOST_LOSSES = 10
"""Engines that one prompt may lose: some prompts end whatever engine they reach."""


class Recycler:
    """Attempts are capped, so that a prompt which fails or ages every time cannot circle for good."""

    def __init__(self, run_state: RunState, data: DataSource, dead_letters: DeadLetters, max_attempts: int) -> None:
        self._run_state = run_state
        self._data = data
        self._dead_letters = dead_letters
        self._max_attempts = max_attempts
        self._losses: Counter[str] = Counter()
        """Engines lost, by prompt."""
        self.recycled = 0
        """Groups sent back as stale since the run began."""

    def retry(self, group: Group, reason: DropReason, error: str) -> None:
        """End this attempt as `reason`; the prompt goes first in line, or, after its last, to the dead letters."""
        self._run_state.drop(group, reason)
        self.recycled += reason is DropReason.STALE
        if group.attempt + 1 >= self._max_attempts:
            self._dead_letters.dead_letter(group, reason, error)
            return
        group.attempt += 1
        self._return(group)

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        """End this attempt for good: no other could end otherwise."""
        self._run_state.drop(group, reason)
        self._dead_letters.dead_letter(group, reason, error)

    def give_back(self, group: Group, reason: DropReason) -> None:
        """End this attempt through no fault of the prompt's: it does not count against the cap."""
        self._run_state.drop(group, reason)
        self._return(group)

    def lost(self, group: Group, error: str) -> None:
        """The engine of this attempt was lost: no fault of the prompt's, until it happens under it again and again."""
        self._losses[group.feed_index] += 1
        if (losses := self._losses[group.feed_index]) < MOST_LOSSES:
            self.give_back(group, DropReason.ENGINE_LOST)
        else:
            self.dead_letter(group, DropReason.ENGINE_LOST, f"its engine was lost {losses} times: {error}")

    def salvage(self, group: Group, reason: DropReason) -> None:
        """End this attempt but keep its tokens: the next one continues them. It keeps its first version with them."""
        self._run_state.drop(group, reason)
        group.sequence = None
        self._data.add_samples([group])

    def _return(self, group: Group) -> None:
        group.reset()
        self._data.add_samples([group])
