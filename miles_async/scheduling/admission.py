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


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits on groups that are admitted at once."""

    max_in_flight: int
    """N: groups from admission until reward and filter are done."""
    room: int
    """The most groups in flight, blocked by the window and queued together."""
    slots: int | None
    """B; None if there is no staleness limit."""
    adaptive: AdaptiveConcurrency | None = None
    """Lowers the number in flight below N while the engines are full; None if N alone decides."""
    candidates: Candidates | None = None
    """The groups of the batch that is being generated; None if generation has no batches."""

    def blocked_by(self, ledger: Ledger) -> Blocked | None:
        """The first limit that forbids one more group, or None."""
        counts = ledger.counts
        in_flight = counts[GroupState.FED] + counts[GroupState.IN_FLIGHT]
        if in_flight >= self.max_in_flight:
            return Blocked.IN_FLIGHT
        if self.adaptive is not None and in_flight >= self.adaptive.limit:
            return Blocked.ENGINES
        if self.slots is not None and ledger.held_slots >= self.slots:
            return Blocked.SLOTS
        # Every group in flight may end up in the queue, so its room is reserved before its first token is sampled.
        if in_flight + counts[GroupState.FINISHED] + counts[GroupState.QUEUED] >= self.room:
            return Blocked.ROOM
        return None
