"""Looks on while the run goes: loop lag, engine load, and whether anything still moves.

Never waits for another loop, so that it speaks when the others are stuck.
"""

from __future__ import annotations

from miles_async.errors import FatalError
from miles_async.events import EngineBusy, LoopLag, Pulse, Stalled
from miles_async.pipeline.collect import BatchCollector
from miles_async.pipeline.produce import Producer
from miles_async.pipeline.run_state import RunState
from miles_async.ports import Generator
from miles_async.scheduling.stall import StallClock

TICK_SECONDS = 0.5


class RunMonitor:
    def __init__(
        self,
        *,
        run_state: RunState,
        producer: Producer,
        drain: BatchCollector,
        generator: Generator,
        warn_seconds: float,
        abort_seconds: float,
    ) -> None:
        self._run_state = run_state
        self._producer = producer
        self._collector = drain
        self._generator = generator
        self._stall = StallClock(warn_seconds)
        self._abort_seconds = abort_seconds
        self._head = 0, run_state.clock.now()
        """Head of the window, and when it was first seen there."""

    async def run(self) -> None:
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
            still = now - run_state.last_progress
            if self._stall.due(still):
                self._warn(now, still)
            if still >= self._abort_seconds:
                raise FatalError(self._where_all_stands(still))

    def _where_all_stands(self, still: float) -> str:
        run_state, producer = self._run_state, self._producer
        dropped = (
            ", ".join(f"{count} {reason}" for reason, count in run_state.ledger.dropped.items() if count) or "none"
        )
        return (
            f"nothing moved for {still:.0f}s (--no-progress-abort-seconds): queue {len(producer.queue)}, "
            f"{self._generator.in_flight} requests in flight, {producer.rewarding} groups wait for rewards, "
            f"trainer version {run_state.trainer_version}, live version {run_state.live_version}; dropped: {dropped}"
        )

    def _pulse(self, now: float) -> Pulse:
        run_state, producer = self._run_state, self._producer
        head = producer.window.head
        if head != self._head[0]:
            self._head = head, now
        oldest, went_there = next(iter(producer.at_engines_since.items()), (None, now))
        cause, waits_since = producer.waits_for or (None, now)
        return Pulse(
            time=now,
            generating=len(producer.at_engines_since),
            rewarding=producer.rewarding,
            oldest=oldest,
            oldest_seconds=now - went_there,
            waits_for=cause,
            waits_seconds=now - waits_since,
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

    def _warn(self, now: float, still: float) -> None:
        self._run_state.events.emit(
            Stalled(
                time=now,
                seconds=still,
                queue=len(self._producer.queue),
                collected=self._collector.collected,
                wanted=self._collector.wanted,
            )
        )
