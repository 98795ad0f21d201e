"""From prompt to queue: admission, attempts, window.

The feed loop admits groups. Each admitted group has its own task until the group is kept, dropped or requeued. The
tasks change shared state only between two awaits, so no lock is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from miles_async.events import AdmissionBlocked, QueueChanged
from miles_async.pipeline.attempt import Attempts
from miles_async.pipeline.lifecycle import GroupLifecycle, sequence_of
from miles_async.pipeline.repair import EngineChecks
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.scheduling.admission import Admission, Blocked
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.queue import GroupQueue
from miles_async.scheduling.shares import Shares
from miles_async.scheduling.window import FIFOWindow, HeadPolicy
from miles_async.types import Group


@dataclass(slots=True)
class Line:
    """The path of the groups of one adapter to the trainer. A run that does not train several has one line."""

    window: FIFOWindow[Group]
    queue: GroupQueue[Group]


@dataclass(kw_only=True, eq=False, repr=False)
class Producer:
    """Keeps generation going between `start` and `stop`, and fills the queue in window order.

    Example::

        async with TaskSupervisor() as tasks:
            producer = Producer(tasks=tasks, lifecycle=lifecycle, attempts=attempts, ...)
            producer.start(Admission(max_in_flight=64, room=1000, slots=96))
            await run_state.changed.until(lambda: producer.queued > 0)
            group = producer.lines[""].queue.get()
            await producer.stop()
    """

    run_state: RunState
    lifecycle: GroupLifecycle
    tasks: TaskSupervisor
    attempts: Attempts
    engines: EngineChecks
    head_policy: HeadPolicy
    window_size: int
    queue_capacity: int
    weights: Mapping[str, float]
    """The share of each adapter, by its name. A run that does not train several has one, whose name is empty."""

    def __post_init__(self) -> None:
        self._quarantine = self.lifecycle.quarantine
        self.waits_for: tuple[Blocked, float] | None = None
        """The limit that blocks admission now, and since when."""
        self.lines = {
            name: Line(FIFOWindow(self.window_size), GroupQueue(self.queue_capacity)) for name in self.weights
        }
        """By adapter. The positions of all windows are sequence numbers of the run; those of other adapters are
        dropped from a window, so that they do not count."""
        self._shares = Shares(self.weights)
        self._data_empty_at = -1
        """Value of `changed.count` when the feed last found no data."""
        self._loops: list[asyncio.Task[None]] = []
        """The feed loop and the head loop, while the producer runs."""
        self._in_progress: set[asyncio.Task[None]] = set()
        """The tasks of groups in progress."""
        self._closed = False
        """Whether `close` was called."""
        self.finished_since_close = 0
        """Groups that were kept since `close`."""

    @property
    def queued(self) -> int:
        """Number of groups in the queues."""
        return sum(len(line.queue) for line in self.lines.values())

    @property
    def blocked(self) -> int:
        """Number of finished groups outside the windows."""
        return sum(line.window.blocked for line in self.lines.values())

    @property
    def head(self) -> int:
        """The oldest group that is neither collected nor dropped."""
        return min(line.window.head for line in self.lines.values())

    def start(self, admission: Admission) -> None:
        """Start admitting groups within the limits of `admission`. Does nothing after `close`."""
        if self._closed:
            return
        self.attempts.grading.candidates = admission.candidates
        self._loops = [self.tasks.spawn("feed", self._feed(admission))]
        if self.head_policy.active:
            self._loops += [
                self.tasks.spawn(f"head-{name}", self._enforce_head_deadline(line.window))
                for name, line in self.lines.items()
            ]

    def keep_running(self, admission: Admission) -> None:
        """Call `start` unless the producer runs."""
        if not self._loops:
            self.start(admission)

    async def stop(self) -> None:
        """Stop admitting groups, and abort those in flight. Returns when nothing is in flight.

        After `close`, this does nothing: groups in flight may finish.
        """
        self._end_loops()
        if not self._closed:
            await self.abort()

    def close(self) -> None:
        """Admit no more groups in this run. Groups in flight may finish."""
        self._closed = True
        self._end_loops()

    async def abort(self) -> None:
        """Abort the groups in flight and requeue them. Returns when nothing is in flight."""
        # Groups that were admitted but whose task has not started must not reach the engines after the abort.
        with self.attempts.aborting():
            if self.lifecycle.ledger.counts[GroupState.IN_FLIGHT]:
                await self.attempts.abort_requests()
            # Waits for tasks and not for states: at the end of a run that failed, the tasks are cancelled.
            while self._in_progress:
                await asyncio.wait(self._in_progress)

    def _end_loops(self) -> None:
        while self._loops:
            self._loops.pop().cancel()
        self.waits_for = None

    def restore(self, queued: Sequence[Group], finished: Sequence[Group]) -> None:
        """Continue a stored run. `queued` are the groups in the queue, in order, and `finished` those that follow them.

        Windows begin at the next sequence number, because no older attempt is left that they could wait for.
        """
        for name, line in self.lines.items():
            line.queue.restore([one for one in (*queued, *finished) if self.run_state.adapter_of(one) == name])
            line.window = FIFOWindow(line.window.window_size, first=self.lifecycle.ledger.fed)
        self.lifecycle.advance(finished, GroupState.QUEUED)

    def skip(self, sequence: int) -> None:
        """Let the windows pass a sequence number whose group was generated outside the pipeline."""
        for line in self.lines.values():
            line.window.drop(sequence)
            self._fill_queue(line)

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended and no group is in progress that could still reach the queue."""
        counts = self.lifecycle.ledger.counts
        in_progress = any(
            counts[state] for state in (GroupState.FED, GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED)
        )
        # A notification after the feed looked may have been a prompt that was requeued, so the look is outdated.
        data_empty = self._data_empty_at == self.run_state.changed.count
        return data_empty and not in_progress and not self._quarantine.waiting

    async def _feed(self, admission: Admission) -> None:
        """Admit groups while no limit blocks. Unblocked by a group that ends, a publish, a batch or a new engine."""
        run_state = self.run_state

        def blocked() -> Blocked | None:
            if not self.engines.serving():
                return Blocked.NO_ENGINE
            if self._quarantine.wants_engines_alone and self._engines_in_use():
                return Blocked.TRIAL
            causes = [admission.blocked_by(self.lifecycle.ledger, name) for name in self._candidates()]
            return None if None in causes else causes[0]

        def no_longer_blocked_by(cause: Blocked) -> bool:
            return blocked() is not cause

        while True:
            if cause := blocked():
                blocked_at = run_state.clock.monotonic()
                self.waits_for = cause, blocked_at
                # Also wakes up if another limit blocks now, so that the time is attributed to the right cause.
                await run_state.changed.until(partial(no_longer_blocked_by, cause))
                self.waits_for = None
                run_state.journal.emit(
                    AdmissionBlocked(
                        time=run_state.clock.time(), cause=cause, seconds=run_state.clock.monotonic() - blocked_at
                    )
                )
                continue
            free = [name for name in self._candidates() if admission.blocked_by(self.lifecycle.ledger, name) is None]
            groups = self._feed_one_of(free)
            if not groups:
                # Wakes the collector, which checks `exhausted`. A group in progress may still be requeued.
                run_state.changed.notify()
                self._data_empty_at = run_state.changed.count
                await run_state.changed.next_change()
                continue
            for group in groups:
                task = self.tasks.spawn(f"group-{group.sequence}", self._produce(group))
                self._in_progress.add(task)
                task.add_done_callback(self._in_progress.discard)
            # A generator that never suspends (a replayed recording) must not starve the other loops.
            await asyncio.sleep(0)

    def _candidates(self) -> Collection[str]:
        """The adapters whose prompts may be fed now: only that of a suspect whose trial is due, or all."""
        due = self._quarantine.due
        return self.lines if due is None else (self.run_state.adapter_of(due),)

    def _feed_one_of(self, adapters: Collection[str]) -> list[Group]:
        """Feed the next prompt of the adapter whose turn it is; an adapter without prompts is passed over."""
        left = set(adapters)
        while left:
            name = self._shares.next(left)
            if groups := self.lifecycle.feed_next(name):
                self._shares.count(name)
                for other in self.lines.keys() - {name}:
                    for group in groups:
                        self.lines[other].window.drop(sequence_of(group))
                return groups
            left.discard(name)
        return []

    def _engines_in_use(self) -> bool:
        return bool(self.lifecycle.ledger.in_flight or self.run_state.evaluation_requests)

    async def _enforce_head_deadline(self, window: FIFOWindow[Group]) -> None:
        """Abort each head of a window that stays at the engines past its deadline."""
        run_state = self.run_state

        def moved_past(head: int) -> bool:
            return window.head != head

        while True:
            # An abort cannot help a head that is not admitted yet or is being scored.
            await run_state.changed.until(lambda: window.head in self.attempts.generating)
            head = window.head
            try:
                async with asyncio.timeout(self.head_policy.deadline_seconds):
                    await run_state.changed.until(partial(moved_past, head))
                continue
            except TimeoutError:
                pass
            await self.attempts.abort_overdue(head)
            # The aborted attempt must end before the next head is measured.
            await run_state.changed.until(partial(moved_past, head))

    async def _produce(self, group: Group) -> None:
        """Make one attempt at a group, and let the window pass its sequence number."""
        sequence = sequence_of(group)
        # Log lines of this task name the group, including those of a user's function.
        structlog.contextvars.bind_contextvars(group=sequence, feed_index=group.feed_index)
        line = self.lines[self.run_state.adapter_of(group)]
        self.lifecycle.advance([group], GroupState.IN_FLIGHT)
        if await self.attempts.make(group):
            self.finished_since_close += self._closed
            self.lifecycle.advance([group], GroupState.FINISHED)
            line.window.mark_completed(sequence, group)
        else:
            # The sequence number belongs to this attempt; the window extends past it, and a retry gets a new number.
            line.window.drop(sequence)
        self._fill_queue(line)

    def _fill_queue(self, line: Line) -> None:
        """Move the groups that a window releases into its queue."""
        for group in line.window.drain():
            line.queue.put(group)
            self.lifecycle.advance([group], GroupState.QUEUED)
            self.run_state.mark_progress()
        self.run_state.journal.emit(
            QueueChanged(time=self.run_state.clock.time(), depth=self.queued, blocked=self.blocked)
        )
