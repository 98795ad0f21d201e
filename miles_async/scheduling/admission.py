"""Decides when the next group may start.

Admission bounds staleness without discarding work: with B slots between admission and live weights, no freshly sampled
group can exceed the staleness that `scheduling/bounds.py` derives. Admission keeps no counters; it reads the
ledger's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.ledger import GroupState, Ledger


class Blocked(StrEnum):
    """The limit that blocks admission. Each member's text names the event that unblocks it."""

    NO_ENGINE = "no_engine"
    """Requests reach no engine; an engine that joins, or a router that answers again, unblocks admission."""
    TRIAL = "trial"
    """A prompt that may crash engines is generated alone (`scheduling/quarantine.py`); its end unblocks admission."""
    IN_FLIGHT = "in_flight"
    """N groups are being generated; a group that ends unblocks admission."""
    ENGINES = "engines"
    """The engines are full with fewer than N groups; the adaptive limit rising unblocks admission."""
    SLOTS = "slots"
    """B groups lie between admission and live weights; a publish or a drop unblocks admission."""
    ROOM = "queue"
    """Groups in flight, blocked by the window and queued would fill the queue; a collected batch unblocks admission."""


@dataclass(slots=True)
class Candidates:
    """Counts the groups that are left for a batch as slime does, where generation goes on in rounds.

    A round has `per_round` groups. A group that the dynamic filter drops leaves its round, and the next round begins
    when fewer than `wanted` are left. A filter may ask to keep a rejected group if dropping it would begin a round.
    """

    wanted: int
    per_round: int
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.per_round

    @property
    def insufficient(self) -> bool:
        """Whether one group less would be too few for the batch."""
        return self._left <= self.wanted

    def drop(self) -> None:
        """Count a group that was dropped."""
        self._left -= 1
        if self._left < self.wanted:
            self._left += self.per_round


_BEFORE_BATCH = (GroupState.FED, GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED)


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits on groups that are admitted at once."""

    max_in_flight: int
    """N for each adapter, added up: groups of the whole run from admission until reward and filter are done."""
    room: int
    """The most groups of an adapter that are in flight, blocked by the window and queued together."""
    slots: int | None
    """B, which each adapter has; None if there is no staleness limit."""
    adaptive: AdaptiveConcurrency | None = None
    """Lowers the number in flight below N while the engines are full; None if N alone decides."""
    candidates: Candidates | None = None
    """The groups of the batch that is being generated; None if generation has no batches."""

    def blocked_by(self, ledger: Ledger, adapter: str = "") -> Blocked | None:
        """The first limit that forbids one more group of an adapter, or None."""
        if ledger.in_flight >= self.max_in_flight:
            return Blocked.IN_FLIGHT
        if self.adaptive is not None and ledger.in_flight >= self.adaptive.limit:
            return Blocked.ENGINES
        live = ledger.live(adapter)
        if self.slots is not None and live.total() >= self.slots:
            return Blocked.SLOTS
        # Every group in flight may end up in the queue, so its room is reserved before its first token is sampled.
        if sum(live[state] for state in _BEFORE_BATCH) >= self.room:
            return Blocked.ROOM
        return None
