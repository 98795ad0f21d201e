"""Asks the engines how full they are, and tells the limit on groups in flight (`--adaptive-concurrency`)."""

from __future__ import annotations

from miles_async.pipeline.run_state import RunState
from miles_async.ports import Fleet
from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.ledger import GroupState

FEEDBACK_SECONDS = 0.5


async def follow_engines(run_state: RunState, fleet: Fleet, limit: AdaptiveConcurrency) -> None:
    """Runs until cancelled; waits for the engines' answers alone. A limit that grew unblocks the feed."""
    counts = run_state.ledger.counts
    while True:
        await run_state.clock.sleep(FEEDBACK_SECONDS)
        loads = await fleet.loads()
        in_flight = counts[GroupState.FED] + counts[GroupState.IN_FLIGHT]
        # Whatever left the engines, for whatever reason, has made room there.
        limit.observe(loads, in_flight, ended=run_state.ledger.fed - in_flight)
        run_state.changed.notify()
