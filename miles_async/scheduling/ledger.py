"""Where every group is. Each attempt is in exactly one state, and none is ever lost or counted twice.

    fed -> in_flight -> finished -> queued -> leased -> trained -> published
      \\________________________________________________/
                       dropped(reason)

A recycled prompt ends its attempt as dropped and starts a new one, with a new sequence number. Transitions are plain
values, so that a journal can record them without the ledger knowing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from miles_async.errors import LedgerError
from miles_async.types import DropReason


class GroupState(StrEnum):
    FED = "fed"
    """Taken from the data source."""
    IN_FLIGHT = "in_flight"
    """Being generated, rewarded or filtered."""
    FINISHED = "finished"
    """Kept, and waiting for the window."""
    QUEUED = "queued"
    LEASED = "leased"
    """Part of the batch the trainer holds."""
    TRAINED = "trained"
    """In the weights, which are not live yet."""
    PUBLISHED = "published"
    """The weights it helped train are live on every routed engine."""
    DROPPED = "dropped"


LIVE = (
    GroupState.FED,
    GroupState.IN_FLIGHT,
    GroupState.FINISHED,
    GroupState.QUEUED,
    GroupState.LEASED,
    GroupState.TRAINED,
)
"""States that hold a slot."""

_NEXT = dict(zip((*LIVE,), (*LIVE[1:], GroupState.PUBLISHED), strict=True))


class Transition(NamedTuple):
    sequence: int
    before: GroupState | None
    after: GroupState
    reason: DropReason | None


class Ledger:
    """Counts by state, and the one place that hands out sequence numbers.

    Raises LedgerError when a group takes a step its state does not allow: a bug of the scheduler, not of the data.
    """

    def __init__(self) -> None:
        self.counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        """Groups in each live state now; for `published` and `dropped`, since the run began."""
        self.dropped: dict[DropReason, int] = dict.fromkeys(DropReason, 0)
        self._states: dict[int, GroupState] = {}
        self._next_sequence = 0

    @property
    def fed(self) -> int:
        """Attempts started since the run began."""
        return self._next_sequence

    @property
    def held_slots(self) -> int:
        return len(self._states)

    def feed(self) -> Transition:
        """Start an attempt; its sequence number is in the transition."""
        sequence = self._next_sequence
        self._next_sequence += 1
        self._states[sequence] = GroupState.FED
        self.counts[GroupState.FED] += 1
        return Transition(sequence, None, GroupState.FED, None)

    def advance(self, sequence: int, after: GroupState) -> Transition:
        """Move a group to the next state of its way."""
        before = self._state(sequence)
        if _NEXT[before] is not after:
            raise LedgerError(f"group {sequence} cannot go from {before} to {after}")
        return self._move(sequence, before, after, None)

    def drop(self, sequence: int, reason: DropReason) -> Transition:
        """End an attempt without training. Trained groups cannot be dropped: they are in the weights."""
        before = self._state(sequence)
        if before is GroupState.TRAINED:
            raise LedgerError(f"group {sequence} is trained and cannot be dropped as {reason}")
        self.dropped[reason] += 1
        return self._move(sequence, before, GroupState.DROPPED, reason)

    def state(self, sequence: int) -> GroupState | None:
        """None once the attempt has ended."""
        return self._states.get(sequence)

    def check_conservation(self) -> None:
        """Every attempt fed is live in one state, published or dropped. Raises LedgerError otherwise."""
        live = sum(self.counts[state] for state in LIVE)
        ended = self.counts[GroupState.PUBLISHED] + self.counts[GroupState.DROPPED]
        if (
            live != len(self._states)
            or live + ended != self.fed
            or self.counts[GroupState.DROPPED] != sum(self.dropped.values())
        ):
            raise LedgerError(f"{self.fed} groups fed, but {live} live and {ended} ended: {self.counts}")

    def _state(self, sequence: int) -> GroupState:
        try:
            return self._states[sequence]
        except KeyError:
            raise LedgerError(f"group {sequence} is not live: it ended before, or was never fed") from None

    def _move(self, sequence: int, before: GroupState, after: GroupState, reason: DropReason | None) -> Transition:
        self.counts[before] -= 1
        self.counts[after] += 1
        if after in _NEXT:
            self._states[sequence] = after
        else:
            del self._states[sequence]
        return Transition(sequence, before, after, reason)
