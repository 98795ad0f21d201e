"""From prompt to queue: admission, generation, reward, filter, window.

The feed loop admits groups. Each admitted group has its own task until the group is kept, dropped or fed again. The
tasks change shared state only between two awaits, so no lock is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any

import structlog

from miles_async.errors import (
    EngineLostError,
    InfrastructureError,
    PromptTooLongError,
    RouterLostError,
    TrajectoryError,
)
from miles_async.events import AdmissionBlocked, GroupFiltered, GroupGenerated, QueueChanged
from miles_async.pipeline.recycle import Recycler
from miles_async.pipeline.run_state import RunState, sequence_of
from miles_async.pipeline.sample_display import SampleDisplay
from miles_async.pipeline.score import score
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.pipeline.training import mean_reward
from miles_async.ports import DataSource, Generator, Rewarder
from miles_async.sample_schema import SampleLimits, check_group
from miles_async.scheduling.admission import Admission, Blocked, Candidates
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.queue import GroupQueue
from miles_async.scheduling.window import FIFOWindow, HeadAction, HeadPolicy
from miles_async.types import DropReason, Group, SampleStatus, Verdict, trajectories_of

ENGINE_LOST_PAUSE_SECONDS = 1.0
"""Delay before a group is requeued after its engine or router was lost, or after an engine aborted its requests on its
own. The next health check has to notice the loss."""


class Outcome(Enum):
    """The result of an attempt."""

    KEPT = auto()
    FILTERED = auto()
    ABORTED = auto()
    FAILED = auto()


class Producer:
    """Keeps generation going between `start` and `stop`, and fills the queue in window order.

    Example::

        async with TaskSupervisor() as tasks:
            producer = Producer(tasks=tasks, data=data, generator=generator, ...)
            producer.start(Admission(max_in_flight=64, room=1000, slots=96))
            await run_state.changed.until(lambda: len(producer.queue) > 0)
            group = producer.queue.get()
            await producer.stop()
    """

    def __init__(
        self,
        *,
        run_state: RunState,
        tasks: TaskSupervisor,
        data: DataSource,
        generator: Generator,
        rewarder: Rewarder,
        keep: Callable[[Group], Verdict],
        limits: SampleLimits,
        recycler: Recycler,
        window_size: int,
        head_policy: HeadPolicy,
        queue_capacity: int,
        min_samples: int,
        max_attempts: int,
        partial_rollout: bool,
        engines_available: Callable[[], bool],
        check_engines: Callable[[], Coroutine[Any, Any, None]],
        sample_display: SampleDisplay,
    ) -> None:
        """`keep` is the dynamic filter; `limits` are those of the model and the learner; `engines_available` returns
        whether requests reach an engine; `check_engines` fences the engines that do not answer.

        A group that lost samples to infrastructure is trained if it has `min_samples` left. Samples are scored up to
        `max_attempts` times.
        """
        self._run_state = run_state
        self._tasks = tasks
        self._data = data
        self._generator = generator
        self._rewarder = rewarder
        self._keep = keep
        self._candidates: Candidates | None = None
        """The groups of the batch that is being generated; None in the stream."""
        self._limits = limits
        self._recycler = recycler
        self._head_policy = head_policy
        self._min_samples = min_samples
        self._max_attempts = max_attempts
        self._partial_rollout = partial_rollout
        self._engines_available = engines_available
        self._check_engines = check_engines
        self._quarantine = run_state.quarantine
        self._sample_display = sample_display
        self._generating: dict[int, Group] = {}
        """Groups at the engines, by sequence number."""
        self.at_engines_since: dict[int, float] = {}
        """When each of these groups was sent to the engines (`Clock.monotonic`), by sequence number, oldest first."""
        self.rewarding = 0
        """Number of groups that are generated and wait for their reward."""
        self.waits_for: tuple[Blocked, float] | None = None
        """The limit that blocks admission now, and since when."""
        self._overdue: set[int] = set()
        """Groups that the head policy aborted and whose attempts have not ended yet."""
        self._salvaged: dict[str, int] = {}
        """Tokens that the unfinished samples had when their group was salvaged, by feed index."""
        self.queue: GroupQueue[Group] = GroupQueue(queue_capacity)
        self.window: FIFOWindow[Group] = FIFOWindow(window_size)
        self._data_empty_at = -1
        """Value of `changed.count` when the feed last found no data."""
        self._loops: list[asyncio.Task[None]] = []
        """The feed loop and the head loop, while the producer runs."""
        self._attempts: set[asyncio.Task[None]] = set()
        """The tasks of groups in progress."""
        self._stopping = False
        self._aborts = 0
        """Calls of `abort` since the run began."""
        self._closed = False
        """Whether `close` was called."""
        self.finished_since_close = 0
        """Groups that were kept since `close`."""

    @property
    def in_flight(self) -> int:
        """Number of groups that are admitted and not yet finished or dropped."""
        counts = self._run_state.ledger.counts
        return counts[GroupState.FED] + counts[GroupState.IN_FLIGHT]

    def start(self, admission: Admission) -> None:
        """Start to admit groups within the limits of `admission`. Does nothing after `close`."""
        if self._closed:
            return
        self._candidates = admission.candidates
        self._loops = [self._tasks.spawn("feed", self._feed(admission))]
        if self._head_policy.active:
            self._loops.append(self._tasks.spawn("head", self._enforce_head_deadline()))

    async def stop(self) -> None:
        """Stop to admit groups, and abort those in flight. Returns when nothing is in flight.

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
        """Abort the groups in flight and feed them again. Returns when nothing is in flight."""
        # Groups that were admitted but whose task has not started must not reach the engines after the abort.
        self._stopping = True
        self._aborts += 1
        try:
            if self._run_state.ledger.counts[GroupState.IN_FLIGHT]:
                # Requests at a lost engine cannot be aborted; they fail when its process ends.
                with suppress(EngineLostError):
                    await self._generator.abort()
            # Waits for tasks and not for states: at the end of a run that failed, the tasks are cancelled.
            while self._attempts:
                await asyncio.wait(self._attempts)
        finally:
            self._stopping = False

    def _end_loops(self) -> None:
        while self._loops:
            self._loops.pop().cancel()
        self.waits_for = None

    def restore(self, queued: Sequence[Group], finished: Sequence[Group]) -> None:
        """Continue a stored run. `queued` are the groups in the queue, in order, and `finished` those that follow them.

        The window begins at the next sequence number, because no older attempt is left that it could wait for.
        """
        self.queue.restore([*queued, *finished])
        self._run_state.advance(finished, GroupState.QUEUED)
        self.window = FIFOWindow(self.window.window_size, first=self._run_state.ledger.fed)

    def skip(self, sequence: int) -> None:
        """Let the window pass a sequence number whose group was generated outside the pipeline."""
        self.window.drop(sequence)
        self._fill_queue()

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended and no group is in progress that could still reach the queue."""
        counts = self._run_state.ledger.counts
        in_progress = any(
            counts[state] for state in (GroupState.FED, GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED)
        )
        # A notification after the feed looked may have been a prompt that was fed again, so the look is outdated.
        data_empty = self._data_empty_at == self._run_state.changed.count
        return data_empty and not in_progress and not self._quarantine.waiting

    async def _feed(self, admission: Admission) -> None:
        """Admit groups while no limit blocks. Unblocked by a group that ends, a publish, a batch or a new engine."""
        run_state = self._run_state

        def blocked() -> Blocked | None:
            if not self._engines_available():
                return Blocked.NO_ENGINE
            if self._quarantine.wants_engines_alone and self._engines_in_use():
                return Blocked.TRIAL
            return admission.blocked_by(run_state.ledger)

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
            suspect = self._quarantine.release()
            groups = self._data.get_samples(1) if suspect is None else [suspect]
            if not groups:
                # Wakes the collector, which checks `exhausted`. A group in progress may still feed its prompt again.
                run_state.changed.notify()
                self._data_empty_at = run_state.changed.count
                await run_state.changed.next_change()
                continue
            for group in groups:
                run_state.feed(group)
                attempt = self._tasks.spawn(f"group-{group.sequence}", self._produce(group))
                self._attempts.add(attempt)
                attempt.add_done_callback(self._attempts.discard)
            # A generator that never suspends (a replayed recording) must not starve the other loops.
            await asyncio.sleep(0)

    def _engines_in_use(self) -> bool:
        return bool(self.in_flight or self._run_state.evaluation_requests)

    async def _enforce_head_deadline(self) -> None:
        """Abort each head of the window that stays at the engines past its deadline."""
        run_state, window = self._run_state, self.window
        while True:
            # An abort cannot help a head that is not admitted yet or is being scored.
            await run_state.changed.until(lambda: window.head in self._generating)
            head = window.head
            try:
                async with asyncio.timeout(self._head_policy.deadline_seconds):
                    await run_state.changed.until(partial(self._head_moved_past, head))
                continue
            except TimeoutError:
                pass
            if group := self._generating.get(head):
                self._overdue.add(head)
                with suppress(EngineLostError):
                    await self._generator.abort(group)
            # The aborted attempt must end before the next head is measured.
            await run_state.changed.until(partial(self._head_moved_past, head))

    def _head_moved_past(self, head: int) -> bool:
        return self.window.head != head

    async def _produce(self, group: Group) -> None:
        """Make one attempt at a group and record its outcome in ledger and window."""
        run_state, sequence = self._run_state, sequence_of(group)
        # Log lines of this task name the group, including those of a user's function.
        structlog.contextvars.bind_contextvars(group=sequence, feed_index=group.feed_index)
        run_state.advance([group], GroupState.IN_FLIGHT)
        aborts_before = self._aborts
        try:
            outcome = await self._attempt(group)
        except PromptTooLongError as error:
            outcome = Outcome.FAILED
            self._recycler.dead_letter(group, DropReason.PROMPT_TOO_LONG, str(error))
        except TrajectoryError as error:
            outcome = Outcome.FAILED
            self._quarantine.clear(group)
            for sample in error.samples:
                sample.status = SampleStatus.FAILED
            # An error that names no sample may be the fault of any.
            self._recycler.fail(
                group,
                str(error),
                keeps_finished=bool(error.samples),
                may_pass=isinstance(error, InfrastructureError),
            )
        except EngineLostError as error:
            outcome = Outcome.FAILED
            if not self._stopping:
                # A dead engine has the fewest requests, so the router prefers it until the check has fenced it.
                self._tasks.spawn("check-engines", self._check_engines())
                await run_state.clock.sleep(ENGINE_LOST_PAUSE_SECONDS)
            if isinstance(error, RouterLostError):
                self._recycler.requeue(group, DropReason.ROUTER_LOST, keeps_finished=True)
            else:
                self._recycler.handle_engine_loss(group, str(error))
        if outcome is Outcome.ABORTED:
            if self._stopping or self._aborts != aborts_before or sequence in self._overdue:
                self._feed_aborted_again(group)
            else:
                # Without a pause and a limit, the group would be requeued forever, thousands of times a second.
                await run_state.clock.sleep(ENGINE_LOST_PAUSE_SECONDS)
                sentence = "its requests ended with an abort that the run did not ask for"
                self._recycler.retry(group, DropReason.ABORTED, sentence, keeps_finished=True)
        elif outcome is Outcome.FILTERED:
            run_state.drop(group, DropReason.FILTERED)
        self._overdue.discard(sequence)
        self._quarantine.end_trial(group)
        if outcome is Outcome.KEPT:
            self.finished_since_close += self._closed
            self._salvaged.pop(group.feed_index, None)
            run_state.advance([group], GroupState.FINISHED)
            self.window.mark_completed(sequence, group)
        else:
            # The sequence number belongs to this attempt; the window extends past it, and a retry gets a new number.
            self.window.drop(sequence)
        self._fill_queue()

    async def _attempt(self, group: Group) -> Outcome:
        """Generate, score and filter. Raises TrajectoryError or EngineLostError instead of returning FAILED."""
        clock, sequence = self._run_state.clock, sequence_of(group)
        if self._quarantine.suspects(group):
            # The trial must not be lost at an engine that another group crashed a moment ago.
            await self._check_engines()
            await self._run_state.changed.until(lambda: self._stopping or self._engines_available())
        if self._stopping:
            return Outcome.ABORTED
        started = clock.monotonic()
        self._generating[sequence] = group
        self.at_engines_since[sequence] = started
        try:
            await self._generate(group)
        except InfrastructureError as error:
            if self._stopping:
                return Outcome.ABORTED
            self._leave_out(group, error)
        finally:
            del self._generating[sequence], self.at_engines_since[sequence]
        if _aborted(group):
            return Outcome.ABORTED
        # The engines survived the prompt, whatever the group is worth.
        self._quarantine.clear(group)
        check_group(group, self._limits, self._run_state.trainer_version)
        generated = clock.monotonic()
        self.rewarding += 1
        try:
            await self._score(group)
        finally:
            self.rewarding -= 1
        verdict = self._keep(group)
        kept = verdict.keep or self._is_needed(verdict)
        if not kept:
            self._run_state.journal.emit(GroupFiltered(time=clock.time(), sequence=sequence, reason=verdict.reason))
        self._run_state.journal.emit(
            GroupGenerated(
                time=clock.time(),
                sequence=sequence,
                generation_seconds=generated - started,
                reward_seconds=clock.monotonic() - generated,
                versions=(group.oldest_version, max(span.version for sample in group for span in sample.spans)),
                response_tokens=group.response_tokens,
                reward=mean_reward([group]),
                truncated=sum(group.truncated),
                missing=len(trajectories_of(group.missing)),
                unfinished_rewards=len(group.unfinished_rewards),
            )
        )
        self._sample_display.offer(group)
        return Outcome.KEPT if kept else Outcome.FILTERED

    def _is_needed(self, rejected: Verdict) -> bool:
        """Whether the batch needs a group that the filter rejected; if not, the group is counted as dropped."""
        if self._candidates is None:
            return False
        if rejected.keep_when_insufficient and self._candidates.insufficient:
            return True
        self._candidates.drop()
        return False

    async def _generate(self, group: Group) -> None:
        """Generate the group, and again after each publish that aborts it.

        The group keeps its sequence number. The trainer cannot run ahead of the head of the window by more than the
        window and the slots allow, so publishes stop until the group has ended, however long it takes.
        """
        run_state = self._run_state
        while True:
            aborts_before = run_state.publish_aborts
            await self._generator.generate(group)
            by_publish = run_state.publish_is_aborting or run_state.publish_aborts != aborts_before
            if not _aborted(group) or not by_publish or self._stopping or sequence_of(group) in self._overdue:
                return
            if not self._partial_rollout:
                for sample in group:
                    if sample.status is SampleStatus.ABORTED:
                        run_state.discard(group, sample, "publish", "a publish aborted the request")
                        sample.reset()

    async def _score(self, group: Group) -> None:
        """Score the samples. Raises the error if too few would be left without those that cannot be scored."""
        error = await score(
            group,
            self._rewarder,
            sleep=self._run_state.clock.sleep,
            max_attempts=self._max_attempts,
            stopping=lambda: self._stopping,
        )
        if error is not None:
            self._leave_out(group, error)
            for sample in error.samples:
                self._run_state.discard(group, sample, DropReason.FAILED, str(error))

    def _leave_out(self, group: Group, error: InfrastructureError) -> None:
        """Continue without the failed samples. Raises the error if too few would be left."""
        if len(group.trajectories) - len(trajectories_of(error.samples)) < self._min_samples:
            raise error
        group.leave_out(error.samples)

    def _feed_aborted_again(self, group: Group) -> None:
        """Feed an aborted group again: with its tokens, or as a fresh attempt."""
        if sequence_of(group) not in self._overdue:
            if self._partial_rollout and group.response_tokens:
                # Finished samples of the group keep their tokens too, because a group is trained as a whole.
                self._recycler.salvage(group, DropReason.PARTIAL)
            else:
                self._recycler.requeue(group, DropReason.ABORTED)
            return
        salvages = self._head_policy.action is HeadAction.SALVAGE
        tokens = sum(sample.response_length for sample in group if not sample.finished)
        if salvages and tokens > self._salvaged.pop(group.feed_index, 0):
            self._salvaged[group.feed_index] = tokens
            self._recycler.salvage(group, DropReason.HEAD_DEADLINE)
        else:
            # An agent that starts again has no more tokens than before. Its attempts are limited.
            self._recycler.retry(
                group,
                DropReason.HEAD_DEADLINE,
                f"it blocked the window for {self._head_policy.deadline_seconds:g}s (--head-deadline-seconds)",
                keeps_finished=salvages,
            )

    def _fill_queue(self) -> None:
        """Move the groups that the window releases into the queue."""
        for group in self.window.drain():
            self.queue.put(group)
            self._run_state.advance([group], GroupState.QUEUED)
            self._run_state.mark_progress()
        self._run_state.journal.emit(
            QueueChanged(time=self._run_state.clock.time(), depth=len(self.queue), blocked=self.window.blocked)
        )


def _aborted(group: Group) -> bool:
    return any(sample.status is SampleStatus.ABORTED for sample in group)
