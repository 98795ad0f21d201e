"""Records the state of every group. Each attempt is in exactly one state; none is lost or counted twice.

    fed -> in_flight -> finished -> queued -> leased -> trained -> published
      \\________________________________________________/
                       dropped(reason)

When a run is restored, a group of a batch that was not trained returns from leased to queued. So does a trained or
published group if the learner was restored from a checkpoint of an earlier rollout.

A recycled prompt ends its attempt as dropped and starts a new attempt with a new sequence number. The ledger returns
transitions as plain values, so that events can be emitted without the ledger knowing about them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from miles_async.errors import LedgerError
from miles_async.types import DropReason


class GroupState(StrEnum):
    """The state of one attempt at a group."""

    FED = "fed"
    """Taken from the data source."""
    IN_FLIGHT = "in_flight"
    """Being generated, rewarded or filtered."""
    FINISHED = "finished"
    """Kept by the filter; waits for the window."""
    QUEUED = "queued"
    """Collected by the window; waits in the queue."""
    LEASED = "leased"
    """Part of the batch that the trainer holds."""
    TRAINED = "trained"
    """Trained on, but the new weights are not live yet."""
    PUBLISHED = "published"
    """The weights that the group helped to train are live on every routed engine."""
    DROPPED = "dropped"
    """Ended without training; `DropReason` gives the cause."""


LIVE = (
    GroupState.FED,
    GroupState.IN_FLIGHT,
    GroupState.FINISHED,
    GroupState.QUEUED,
    GroupState.LEASED,
    GroupState.TRAINED,
)
"""The states in which a group holds a slot, in order."""

_NEXT = dict(zip((*LIVE,), (*LIVE[1:], GroupState.PUBLISHED), strict=True))
"""The only state that may follow each live state, apart from `dropped`."""


_SCORED = (
    GroupState.FINISHED,
    GroupState.QUEUED,
    GroupState.LEASED,
    GroupState.TRAINED,
    GroupState.PUBLISHED,
)
_AFTER_SCORE = (DropReason.FILTERED, DropReason.STALE, DropReason.ROLLED_BACK, DropReason.NONFINITE)
"""Reasons to drop a group that was generated and scored."""


class Transition(NamedTuple):
    """One change of state; `before` is None for a group that was just fed."""

    sequence: int
    before: GroupState | None
    after: GroupState
    reason: DropReason | None


class Ledger:
    """Counts groups by state, and assigns sequence numbers.

    Raises LedgerError for a transition that the current state does not allow, which is a bug in the scheduler.
    """

    def __init__(self) -> None:
        self.counts: dict[GroupState, int] = dict.fromkeys(GroupState, 0)
        """Current number of groups in each live state; for `published` and `dropped`, the number since the start."""
        self.dropped: dict[DropReason, int] = dict.fromkeys(DropReason, 0)
        """Number of dropped groups since the start, by reason."""
        self._states: dict[int, GroupState] = {}
        self._adapters: dict[int, str] = {}
        """The adapter that each live attempt is for; the name is empty unless the run trains several."""
        self._live: defaultdict[str, Counter[GroupState]] = defaultdict(Counter)
        """Current number of groups of each adapter in each live state."""
        self.fed = 0
        """Number of attempts since the run began, which is also the next sequence number."""

    def restore(
        self,
        fed: int,
        states: Mapping[int, GroupState],
        published: int,
        dropped: Mapping[DropReason, int],
        adapters: Mapping[int, str],
    ) -> None:
        """Continue the ledger of a stored run. `states` are those of the live attempts, for `adapters`."""
        self.fed, self._states = fed, dict(states)
        for sequence, state in states.items():
            self._adapters[sequence] = adapters[sequence]
            self._live[adapters[sequence]][state] += 1
            self.counts[state] += 1
        self.counts[GroupState.PUBLISHED] = published
        self.dropped |= dropped
        self.counts[GroupState.DROPPED] = sum(dropped.values())
        self.check_conservation()

    @property
    def has_finished(self) -> bool:
        """Whether any attempt was ever generated and scored, even if it was dropped afterwards."""
        return any(self.counts[state] for state in _SCORED) or any(self.dropped[reason] for reason in _AFTER_SCORE)

    @property
    def in_flight(self) -> int:
        """Number of groups that are admitted and not yet finished or dropped."""
        return self.counts[GroupState.FED] + self.counts[GroupState.IN_FLIGHT]

    def live(self, adapter: str) -> Counter[GroupState]:
        """Current number of groups of an adapter in each live state."""
        return self._live[adapter]

    def feed(self, adapter: str = "") -> Transition:
        """Start an attempt for an adapter. The transition carries its new sequence number."""
        sequence = self.fed
        self.fed += 1
        self._states[sequence], self._adapters[sequence] = GroupState.FED, adapter
        self._live[adapter][GroupState.FED] += 1
        self.counts[GroupState.FED] += 1
        return Transition(sequence, None, GroupState.FED, None)

    def advance(self, sequence: int, after: GroupState) -> Transition:
        """Move a group to `after`, which must be the next state. Raises LedgerError otherwise."""
        before = self._live_state(sequence)
        if _NEXT[before] is not after:
            raise LedgerError(f"group {sequence} cannot go from {before} to {after}; report this bug")
        return self._move(sequence, before, after, None)

    def give_back(self, sequence: int) -> Transition:
        """Return a leased group to the queue. Raises LedgerError for any other group."""
        before = self._live_state(sequence)
        if before is not GroupState.LEASED:
            raise LedgerError(f"group {sequence} cannot return to the queue from {before}; report this bug")
        return self._move(sequence, before, GroupState.QUEUED, None)

    def roll_back(self, sequence: int, adapter: str = "") -> Transition:
        """Return a group to the queue whose training was lost with the learner. Raises LedgerError for a live group
        that is not trained. A group that is not live must be a published one."""
        self._adapters[sequence] = adapter
        if self._states.get(sequence, GroupState.TRAINED) is not GroupState.TRAINED:
            raise LedgerError(f"group {sequence} is not trained and cannot be rolled back; report this bug")
        before = GroupState.TRAINED if sequence in self._states else GroupState.PUBLISHED
        return self._move(sequence, before, GroupState.QUEUED, None)

    def drop(self, sequence: int, reason: DropReason) -> Transition:
        """End an attempt without training. Raises LedgerError for a trained group, which is part of the weights."""
        before = self._live_state(sequence)
        if before is GroupState.TRAINED:
            raise LedgerError(f"group {sequence} is trained and cannot be dropped as {reason}; report this bug")
        self.dropped[reason] += 1
        return self._move(sequence, before, GroupState.DROPPED, reason)

    def state(self, sequence: int) -> GroupState | None:
        """The live state of an attempt; None if the attempt has ended or was never fed."""
        return self._states.get(sequence)

    def check_conservation(self) -> None:
        """Raise LedgerError unless every attempt that was fed is live in one state, published or dropped."""
        live = sum(self.counts[state] for state in LIVE)
        ended = self.counts[GroupState.PUBLISHED] + self.counts[GroupState.DROPPED]
        if (
            live != len(self._states)
            or live + ended != self.fed
            or self.counts[GroupState.DROPPED] != sum(self.dropped.values())
        ):
            raise LedgerError(f"{self.fed} groups were fed, but {live} are live and {ended} ended: {self.counts}")

    def _live_state(self, sequence: int) -> GroupState:
        try:
            return self._states[sequence]
        except KeyError:
            raise LedgerError(f"group {sequence} is not live: it ended or was never fed; report this bug") from None

    def _move(self, sequence: int, before: GroupState, after: GroupState, reason: DropReason | None) -> Transition:
        self.counts[before] -= 1
        self.counts[after] += 1
        live = self._live[self._adapters[sequence]]
        if before in _NEXT:
            live[before] -= 1
        if after in _NEXT:
            live[after] += 1
            self._states[sequence] = after
        else:
            # Published and dropped groups have given their slots back, so the ledger forgets them.
            del self._states[sequence], self._adapters[sequence]
        return Transition(sequence, before, after, reason)
