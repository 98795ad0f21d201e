"""Loops that watch the run: the monitor reports its state and detects stalls, and the load loop adapts concurrency.

The monitor never waits for another loop, so that it still reports when the other loops are stuck.
"""

from __future__ import annotations

from miles_async.errors import FatalError
from miles_async.events import EngineBusy, LoopLag, Pulse, Stalled
from miles_async.pipeline.collect import BatchCollector
from miles_async.pipeline.produce import Producer
from miles_async.pipeline.run_state import RunState
from miles_async.ports import Fleet, Generator
from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.stall import StallClock

TICK_SECONDS = 0.5
"""Time between two reports."""
LOAD_POLL_SECONDS = 0.5
"""Time between two requests for the engines' loads."""


class RunMonitor:
    """Emits the state of the run every tick; warns of stalls, and ends a run that is stalled for too long."""

    def __init__(
        self,
        *,
        run_state: RunState,
        producer: Producer,
        collector: BatchCollector,
        generator: Generator,
        warn_seconds: float,
        abort_seconds: float,
    ) -> None:
        self._run_state = run_state
        self._producer = producer
        self._collector = collector
        self._generator = generator
        self._stall = StallClock(warn_seconds)
        self._abort_seconds = abort_seconds
        self._head = 0, run_state.clock.now()
        """Head of the window, and when it was first seen as the head."""

    async def run(self) -> None:
        """Run until cancelled. Raises FatalError after `abort_seconds` without progress."""
        run_state = self._run_state
        while True:
            asleep_at = run_state.clock.now()
            await run_state.clock.sleep(TICK_SECONDS)
            now = run_state.clock.now()
            run_state.events.emit(LoopLag(time=now, seconds=max(0.0, now - asleep_at - TICK_SECONDS)))
            run_state.events.emit(
                EngineBusy(time=now, busy=self._generator.busy_seconds, in_flight=self._generator.in_flight)
            )
            run_state.events.emit(self._pulse(now))
            idle_seconds = now - run_state.last_progress
            if self._stall.due(idle_seconds):
                self._warn(now, idle_seconds)
            if idle_seconds >= self._abort_seconds:
                raise FatalError(self._stall_sentence(idle_seconds))

    def _stall_sentence(self, idle_seconds: float) -> str:
        run_state, producer = self._run_state, self._producer
        dropped = (
            ", ".join(f"{count} {reason}" for reason, count in run_state.ledger.dropped.items() if count) or "none"
        )
        return (
            f"nothing moved for {idle_seconds:.0f}s (--no-progress-abort-seconds): queue {len(producer.queue)}, "
            f"{self._generator.in_flight} requests in flight, {producer.rewarding} groups wait for rewards, "
            f"trainer version {run_state.trainer_version}, live version {run_state.live_version}; dropped: {dropped}"
        )

    def _pulse(self, now: float) -> Pulse:
        run_state, producer = self._run_state, self._producer
        head = producer.window.head
        if head != self._head[0]:
            self._head = head, now
        oldest, sent_at = next(iter(producer.at_engines_since.items()), (None, now))
        cause, blocked_since = producer.waits_for or (None, now)
        return Pulse(
            time=now,
            generating=len(producer.at_engines_since),
            rewarding=producer.rewarding,
            oldest=oldest,
            oldest_seconds=now - sent_at,
            waits_for=cause,
            waits_seconds=now - blocked_since,
            head=head,
            head_state=run_state.ledger.state(head),
            head_seconds=now - self._head[1],
            queue=len(producer.queue),
            blocked=producer.window.blocked,
            collected=self._collector.collected,
            wanted=self._collector.wanted,
            trainer_version=run_state.trainer_version,
            live_version=run_state.live_version,
        )

    def _warn(self, now: float, idle_seconds: float) -> None:
        self._run_state.events.emit(
            Stalled(
                time=now,
                seconds=idle_seconds,
                queue=len(self._producer.queue),
                collected=self._collector.collected,
                wanted=self._collector.wanted,
            )
        )


async def follow_engine_load(run_state: RunState, fleet: Fleet, limit: AdaptiveConcurrency) -> None:
    """Adapt the limit on groups in flight to the engines' load (`--adaptive-concurrency`). Runs until cancelled."""
    counts = run_state.ledger.counts
    while True:
        await run_state.clock.sleep(LOAD_POLL_SECONDS)
        loads = await fleet.loads()
        in_flight = counts[GroupState.FED] + counts[GroupState.IN_FLIGHT]
        # A group that left the engines made room there, whatever its outcome.
        limit.observe(loads, in_flight, ended=run_state.ledger.fed - in_flight)
        # A higher limit may unblock the feed.
        run_state.changed.notify()
