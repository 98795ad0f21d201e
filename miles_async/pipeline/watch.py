"""Looks on while the run goes: loop lag, engine load, and whether anything still moves.

Never waits for another loop, so that it speaks when the others are stuck.
"""

from __future__ import annotations

from miles_async.core.stall import StallClock
from miles_async.errors import Fatal
from miles_async.observability.events import EngineBusy, LoopLag, Pulse, Stalled
from miles_async.pipeline.books import Books
from miles_async.pipeline.drain import Drain
from miles_async.pipeline.produce import Producer
from miles_async.ports import Generator

TICK_SECONDS = 0.5


class Watch:
    def __init__(
        self,
        *,
        books: Books,
        producer: Producer,
        drain: Drain,
        generator: Generator,
        warn_seconds: float,
        abort_seconds: float,
    ) -> None:
        self._books = books
        self._producer = producer
        self._drain = drain
        self._generator = generator
        self._stall = StallClock(warn_seconds)
        self._abort_seconds = abort_seconds
        self._head = 0, books.clock.now()
        """Head of the window, and when it was first seen there."""

    async def run(self) -> None:
        books = self._books
        while True:
            asleep_at = books.clock.now()
            await books.clock.sleep(TICK_SECONDS)
            now = books.clock.now()
            books.events.emit(LoopLag(time=now, seconds=max(0.0, now - asleep_at - TICK_SECONDS)))
            books.events.emit(
                EngineBusy(time=now, busy=self._generator.busy_seconds, in_flight=self._generator.in_flight)
            )
            books.events.emit(self._pulse(now))
            still = now - books.last_progress
            if self._stall.due(still):
                self._warn(now, still)
            if still >= self._abort_seconds:
                raise Fatal(self._where_all_stands(still))

    def _where_all_stands(self, still: float) -> str:
        books, producer = self._books, self._producer
        dropped = ", ".join(f"{count} {reason}" for reason, count in books.ledger.dropped.items() if count) or "none"
        return (
            f"nothing moved for {still:.0f}s (--no-progress-abort-seconds): queue {len(producer.queue)}, "
            f"{self._generator.in_flight} requests in flight, {producer.rewarding} groups wait for rewards, "
            f"trainer version {books.trainer_version}, live version {books.live_version}; dropped: {dropped}"
        )

    def _pulse(self, now: float) -> Pulse:
        books, producer = self._books, self._producer
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
            head_state=books.ledger.state(head),
            head_seconds=now - self._head[1],
            queue=len(producer.queue),
            blocked=producer.window.blocked,
            collected=self._drain.collected,
            wanted=self._drain.wanted,
            trainer_version=books.trainer_version,
            live_version=books.live_version,
        )

    def _warn(self, now: float, still: float) -> None:
        self._books.events.emit(
            Stalled(
                time=now,
                seconds=still,
                queue=len(self._producer.queue),
                collected=self._drain.collected,
                wanted=self._drain.wanted,
            )
        )
