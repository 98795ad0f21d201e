"""From prompt to queue: admission, generation, reward, filter, window.

`feed` is the loop; each group it admits lives in a task of its own until it is kept, dropped or sent back. All of them
change state only between two awaits, so nothing here takes a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from miles_async.core.admission import Admission
from miles_async.core.ledger import State
from miles_async.core.queue import GroupQueue
from miles_async.core.window import WindowedFIFOCollector
from miles_async.errors import BadTrajectory, EngineLost
from miles_async.observability.events import AdmissionBlocked, GroupGenerated, Queue
from miles_async.pipeline.books import Books, sequence_of
from miles_async.pipeline.crew import Crew
from miles_async.pipeline.recycle import Recycler
from miles_async.ports import DataSource, Generator, Rewarder
from miles_async.types import DropReason, Group, SampleStatus

ENGINE_LOST_PAUSE_SECONDS = 1.0
"""Between losing an engine and trying its group elsewhere: long enough for the router to notice, short for the group."""


class Producer:
    """Keeps generation going while its tap is open, and the queue filled in window order."""

    def __init__(
        self,
        *,
        books: Books,
        data: DataSource,
        generator: Generator,
        rewarder: Rewarder,
        keep: Callable[[Group], bool],
        recycler: Recycler,
        window_size: int,
        queue_capacity: int,
    ) -> None:
        self._books = books
        self._data = data
        self._generator = generator
        self._rewarder = rewarder
        self._keep = keep
        self._recycler = recycler
        self.queue: GroupQueue[Group] = GroupQueue(queue_capacity)
        self.window: WindowedFIFOCollector[Group] = WindowedFIFOCollector(None, window_size)
        self._found_nothing_at = -1
        """The notification at which the feed last looked for data and found none."""
        self._feeding: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def is_open(self) -> bool:
        return self._feeding is not None

    def open(self, crew: Crew, admission: Admission) -> None:
        """Start admitting groups, each in a task of `crew`."""
        self._feeding = crew.spawn("feed", self._feed(crew, admission))

    async def close(self) -> None:
        """Stop admitting; what is in flight is aborted and goes back to the feed. Returns when nothing is in flight."""
        if self._feeding is not None:
            self._feeding.cancel()
            self._feeding = None
        counts = self._books.ledger.counts
        self._closing = True
        try:
            if counts[State.IN_FLIGHT]:
                await self._generator.abort()
            await self._books.changed.until(lambda: counts[State.FED] + counts[State.IN_FLIGHT] == 0)
        finally:
            self._closing = False

    async def _feed(self, crew: Crew, admission: Admission) -> None:
        """Waits for a free place in flight, a slot and room; unblocked by a group that ends, a publish, a drain."""
        books = self._books
        while True:
            if cause := admission.blocked_by(books.ledger):
                blocked_at = books.clock.now()
                await books.changed.until(lambda: admission.blocked_by(books.ledger) is None)
                books.events.emit(
                    AdmissionBlocked(time=books.clock.now(), cause=cause, seconds=books.clock.now() - blocked_at)
                )
                continue
            groups = self._data.get_samples(1)
            if not groups:
                books.changed.notify()
                self._found_nothing_at = books.changed.count
                await books.changed.once()
                continue
            for group in groups:
                books.feed(group)
                crew.spawn(f"group-{group.sequence}", self._produce(group))
            # A generator that never suspends (a replayed cache) must not starve the other loops.
            await asyncio.sleep(0)

    async def _produce(self, group: Group) -> None:
        books = self._books
        sequence = sequence_of(group)
        books.advance([group], State.IN_FLIGHT)
        if self._closing:
            self._recycler.give_back(group, DropReason.ABORTED)
            return self._leave(sequence)
        started = books.clock.now()
        try:
            await self._generator.generate(group)
            generated = books.clock.now()
            if any(sample.status is SampleStatus.ABORTED for sample in group):
                self._recycler.give_back(group, DropReason.ABORTED)
                return self._leave(sequence)
            await self._rewarder.score(group)
            kept = self._keep(group)
            oldest, newest = group.oldest_version, max(span.version for sample in group for span in sample.spans)
        except BadTrajectory as error:
            self._recycler.retry(group, DropReason.FAILED, str(error))
            return self._leave(sequence)
        except EngineLost:
            if not self._closing:
                await books.clock.sleep(ENGINE_LOST_PAUSE_SECONDS)
            self._recycler.give_back(group, DropReason.ENGINE_LOST)
            return self._leave(sequence)
        books.events.emit(
            GroupGenerated(
                time=books.clock.now(),
                sequence=sequence,
                started=started,
                generated=generated,
                versions=(oldest, newest),
                response_tokens=group.response_tokens,
                reward=sum(sample.scalar_reward for sample in group) / len(group),
                truncated=sum(sample.status is SampleStatus.TRUNCATED for sample in group),
            )
        )
        if kept:
            books.advance([group], State.FINISHED)
            self.window.mark_completed(sequence, group)
            self._collect()
        else:
            books.drop(group, DropReason.FILTERED)
            self._leave(sequence)

    def _leave(self, sequence: int) -> None:
        """A group that will not be collected gives its place in the window to the next."""
        self.window.drop(sequence)
        self._collect()

    def _collect(self) -> None:
        for group in self.window.drain():
            self.queue.put(group)
            self._books.advance([group], State.QUEUED)
            self._books.progressed()
        self._books.events.emit(
            Queue(time=self._books.clock.now(), depth=len(self.queue), blocked=self.window.blocked)
        )

    @property
    def starved(self) -> bool:
        """Whether the data has ended and nothing is under way that could still reach the queue."""
        counts = self._books.ledger.counts
        under_way = any(counts[state] for state in (State.FED, State.IN_FLIGHT, State.FINISHED, State.QUEUED))
        return self._found_nothing_at == self._books.changed.count and not under_way
