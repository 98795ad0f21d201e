"""From prompt to queue: admission, generation, reward, filter, window.

`feed` is the loop; each group it admits lives in a task of its own until it is kept, dropped or sent back. All of them
change state only between two awaits, so nothing here takes a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from functools import partial

import structlog

from miles_async.errors import EngineLostError, PromptTooLongError, TrajectoryError
from miles_async.events import AdmissionBlocked, GroupFiltered, GroupGenerated, QueueChanged
from miles_async.pipeline.recycle import Recycler
from miles_async.pipeline.run_state import RunState, sequence_of
from miles_async.pipeline.sample_display import SampleDisplay
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import DataSource, Generator, Rewarder
from miles_async.scheduling.admission import Admission, Blocked
from miles_async.scheduling.head import HeadAction, HeadPolicy
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.queue import GroupQueue
from miles_async.scheduling.window import WindowedFIFOCollector
from miles_async.types import DropReason, Group, SampleStatus, Verdict

ENGINE_LOST_PAUSE_SECONDS = 1.0
"""Between losing an engine and trying its group elsewhere: the router needs a moment to notice."""


class Outcome(Enum):
    """How an attempt ended."""

    KEPT = auto()
    FILTERED = auto()
    ABORTED = auto()
    FAILED = auto()


class Producer:
    """Keeps generation going while its tap is open, and the queue filled in window order."""

    def __init__(
        self,
        *,
        run_state: RunState,
        data: DataSource,
        generator: Generator,
        rewarder: Rewarder,
        keep: Callable[[Group], bool | Verdict],
        recycler: Recycler,
        window_size: int,
        head_policy: HeadPolicy,
        queue_capacity: int,
        partial_rollout: bool,
        serving: Callable[[], bool],
        shown: SampleDisplay,
    ) -> None:
        """`serving` tells whether any engine takes requests."""
        self._run_state = run_state
        self._data = data
        self._generator = generator
        self._rewarder = rewarder
        self._keep = keep
        self._recycler = recycler
        self._head_policy = head_policy
        self._partial_rollout = partial_rollout
        self._serving = serving
        self._shown = shown
        self._generating: dict[int, Group] = {}
        """Groups at the engines, by sequence number."""
        self.at_engines_since: dict[int, float] = {}
        """The same groups: when they went there, oldest first."""
        self.rewarding = 0
        """Groups that are generated and wait for their reward."""
        self.waits_for: tuple[Blocked, float] | None = None
        """What admission waits for now, and since when."""
        self._overdue: set[int] = set()
        """Groups that the head policy aborted and that have not come back yet."""
        self.queue: GroupQueue[Group] = GroupQueue(queue_capacity)
        self.window: WindowedFIFOCollector[Group] = WindowedFIFOCollector(None, window_size)
        self._found_nothing_at = -1
        """The notification at which the feed last looked for data and found none."""
        self._loops: list[asyncio.Task[None]] = []
        """Running while the tap is open."""
        self._closing = False

    @property
    def is_open(self) -> bool:
        return bool(self._loops)

    def open(self, tasks: TaskSupervisor, admission: Admission) -> None:
        """Start admitting groups, each in a task of `crew`."""
        self._loops = [tasks.spawn("feed", self._feed(tasks, admission))]
        if self._head_policy.active:
            self._loops.append(tasks.spawn("head", self._hurry_head()))

    async def close(self) -> None:
        """Stop admitting; what is in flight is aborted and goes back to the feed. Returns when nothing is in flight."""
        while self._loops:
            self._loops.pop().cancel()
        self.waits_for = None
        counts = self._run_state.ledger.counts
        self._closing = True
        try:
            if counts[GroupState.IN_FLIGHT]:
                # What a lost engine held ends by itself, when the engine is ended.
                with suppress(EngineLostError):
                    await self._generator.abort()
            await self._run_state.changed.until(lambda: counts[GroupState.FED] + counts[GroupState.IN_FLIGHT] == 0)
        finally:
            self._closing = False

    async def _feed(self, tasks: TaskSupervisor, admission: Admission) -> None:
        """Waits for an engine, a place in flight, a slot and room; unblocked by one that joins, an end, a publish, a
        drain."""
        run_state = self._run_state

        def blocked() -> Blocked | None:
            return admission.blocked_by(run_state.ledger) if self._serving() else Blocked.NO_ENGINE

        def moved_on(cause: Blocked) -> bool:
            return blocked() is not cause

        while True:
            if cause := blocked():
                blocked_at = run_state.clock.now()
                self.waits_for = cause, blocked_at
                await run_state.changed.until(partial(moved_on, cause))
                self.waits_for = None
                run_state.events.emit(
                    AdmissionBlocked(
                        time=run_state.clock.now(), cause=cause, seconds=run_state.clock.now() - blocked_at
                    )
                )
                continue
            groups = self._data.get_samples(1)
            if not groups:
                run_state.changed.notify()
                self._found_nothing_at = run_state.changed.count
                await run_state.changed.once()
                continue
            for group in groups:
                run_state.feed(group)
                tasks.spawn(f"group-{group.sequence}", self._produce(group))
            # A generator that never suspends (a replayed cache) must not starve the other loops.
            await asyncio.sleep(0)

    async def _hurry_head(self) -> None:
        """Waits for a head at the engines to overstay its deadline; unblocked by time, or by the head moving on."""
        run_state, window = self._run_state, self.window
        while True:
            # A head that is not admitted yet, or is being scored, keeps nobody waiting that an abort could help.
            await run_state.changed.until(lambda: window.head in self._generating)
            head = window.head
            try:
                async with asyncio.timeout(self._head_policy.deadline_seconds):
                    await run_state.changed.until(partial(self._moved_past, head))
                continue
            except TimeoutError:
                pass
            if group := self._generating.get(head):
                self._overdue.add(head)
                with suppress(EngineLostError):
                    await self._generator.abort(group)
            await run_state.changed.until(partial(self._moved_past, head))

    def _moved_past(self, head: int) -> bool:
        return self.window.head != head

    async def _produce(self, group: Group) -> None:
        """One attempt, from admission to its end: in the window, or out of it."""
        run_state, sequence = self._run_state, sequence_of(group)
        # The task is the group's own: whatever is logged on the way, by a user's function too, names it.
        structlog.contextvars.bind_contextvars(group=sequence, feed_index=group.feed_index)
        run_state.advance([group], GroupState.IN_FLIGHT)
        try:
            outcome = await self._attempt(group)
        except PromptTooLongError as error:
            outcome = Outcome.FAILED
            self._recycler.dead_letter(group, DropReason.PROMPT_TOO_LONG, str(error))
        except TrajectoryError as error:
            outcome = Outcome.FAILED
            self._recycler.retry(group, DropReason.FAILED, str(error))
        except EngineLostError as error:
            outcome = Outcome.FAILED
            if not self._closing:
                await run_state.clock.sleep(ENGINE_LOST_PAUSE_SECONDS)
            self._recycler.lost(group, str(error))
        if outcome is Outcome.ABORTED:
            self._send_back(group)
        elif outcome is Outcome.FILTERED:
            run_state.drop(group, DropReason.FILTERED)
        self._overdue.discard(sequence)
        if outcome is Outcome.KEPT:
            run_state.advance([group], GroupState.FINISHED)
            self.window.mark_completed(sequence, group)
        else:
            # A group that will not be collected gives its place in the window to the next.
            self.window.drop(sequence)
        self._collect()

    async def _attempt(self, group: Group) -> Outcome:
        """Generate, score and filter. Raises TrajectoryError or EngineLostError instead of returning FAILED."""
        clock, sequence = self._run_state.clock, sequence_of(group)
        if self._closing:
            return Outcome.ABORTED
        started = clock.now()
        self._generating[sequence] = group
        self.at_engines_since[sequence] = started
        try:
            await self._generator.generate(group)
        finally:
            del self._generating[sequence], self.at_engines_since[sequence]
        if any(sample.status is SampleStatus.ABORTED for sample in group):
            return Outcome.ABORTED
        generated = clock.now()
        self.rewarding += 1
        try:
            await self._rewarder.score(group)
        finally:
            self.rewarding -= 1
        verdict = self._keep(group)
        if not verdict:
            reason = verdict.reason if isinstance(verdict, Verdict) else Verdict(False).reason
            self._run_state.events.emit(GroupFiltered(time=clock.now(), sequence=sequence, reason=reason))
        self._run_state.events.emit(
            GroupGenerated(
                time=clock.now(),
                sequence=sequence,
                started=started,
                generated=generated,
                versions=(group.oldest_version, max(span.version for sample in group for span in sample.spans)),
                response_tokens=group.response_tokens,
                reward=sum(sample.scalar_reward for sample in group) / len(group),
                truncated=sum(sample.status is SampleStatus.TRUNCATED for sample in group),
            )
        )
        self._shown.offer(clock.now(), group)
        return Outcome.KEPT if verdict else Outcome.FILTERED

    def _send_back(self, group: Group) -> None:
        """An aborted group goes back to the feed: salvaged or recycled as a slow head, or as nobody's fault."""
        if sequence_of(group) not in self._overdue:
            if self._partial_rollout and group.response_tokens:
                # Its finished samples wait for it too: a group is trained whole.
                self._recycler.salvage(group, DropReason.PARTIAL)
            else:
                self._recycler.give_back(group, DropReason.ABORTED)
        elif self._head_policy.action is HeadAction.SALVAGE and group.response_tokens:
            self._recycler.salvage(group, DropReason.HEAD_DEADLINE)
        else:
            self._recycler.retry(
                group,
                DropReason.HEAD_DEADLINE,
                f"it held up the window for {self._head_policy.deadline_seconds:g}s (--head-deadline-seconds)",
            )

    def _collect(self) -> None:
        for group in self.window.drain():
            self.queue.put(group)
            self._run_state.advance([group], GroupState.QUEUED)
            self._run_state.progressed()
        self._run_state.events.emit(
            QueueChanged(time=self._run_state.clock.now(), depth=len(self.queue), blocked=self.window.blocked)
        )

    @property
    def starved(self) -> bool:
        """Whether the data has ended and nothing is under way that could still reach the queue."""
        counts = self._run_state.ledger.counts
        under_way = any(
            counts[state] for state in (GroupState.FED, GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED)
        )
        return self._found_nothing_at == self._run_state.changed.count and not under_way
