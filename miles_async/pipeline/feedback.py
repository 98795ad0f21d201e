"""Asks the engines how full they are, and tells the limit on groups in flight (`--adaptive-concurrency`)."""

from __future__ import annotations

from miles_async.core.concurrency import AdaptiveConcurrency
from miles_async.core.ledger import State
from miles_async.pipeline.books import Books
from miles_async.ports import Fleet

FEEDBACK_SECONDS = 0.5


async def follow_engines(books: Books, fleet: Fleet, limit: AdaptiveConcurrency) -> None:
    """Runs until cancelled; waits for the engines' answers alone. A limit that grew unblocks the feed."""
    counts = books.ledger.counts
    while True:
        await books.clock.sleep(FEEDBACK_SECONDS)
        loads = await fleet.loads()
        in_flight = counts[State.FED] + counts[State.IN_FLIGHT]
        # Whatever left the engines, for whatever reason, has made room there.
        limit.observe(loads, in_flight, ended=books.ledger.fed - in_flight)
        books.changed.notify()
