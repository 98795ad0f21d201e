"""When the next group may start.

Admission is what bounds staleness without throwing work away: with `slots` groups between admission and live weights,
none can grow older than `scheduling/bounds.py` derives. It owns no counters: the ledger's are the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.ledger import GroupState, Ledger


class Blocked(StrEnum):
    """What admission waits for, and who unblocks it."""

    NO_ENGINE = "no_engine"
    """No engine serves; one that joins unblocks."""
    IN_FLIGHT = "in_flight"
    """N groups are being generated; one that ends unblocks."""
    ENGINES = "engines"
    """Fewer than N are in flight, but the engines are full; the controller raising its limit unblocks."""
    SLOTS = "slots"
    """B groups lie between admission and live weights; a publish, or a drop, unblocks."""
    ROOM = "queue"
    """In flight, held back and queued groups would fill the queue; a drain unblocks."""


@dataclass(frozen=True, slots=True)
class Admission:
    max_in_flight: int
    """N: groups from admission until reward and filter are done."""
    room: int
    """Groups in flight, held back by the window and queued at most."""
    slots: int | None
    """B; None where no staleness limit is set."""
    adaptive: AdaptiveConcurrency | None = None
    """Keeps less than N in flight while the engines are full; None where N alone decides."""

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
        if in_flight + counts[GroupState.FINISHED] + counts[GroupState.QUEUED] >= self.room:
            return Blocked.ROOM
        return None
