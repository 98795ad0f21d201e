"""One attempt at a group: generate, score, filter; and what follows if the attempt fails or is aborted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto

from miles_async.errors import (
    EngineLostError,
    InfrastructureError,
    PromptTooLongError,
    RouterLostError,
    TrajectoryError,
)
from miles_async.events import GroupFiltered
from miles_async.pipeline.grading import Grading, generated_event
from miles_async.pipeline.lifecycle import GroupLifecycle, sequence_of
from miles_async.pipeline.repair import EngineChecks
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.sample_display import SampleDisplay
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.ports import Generator
from miles_async.scheduling.window import HeadAction, HeadPolicy
from miles_async.types import DropReason, Group, SampleStatus

ENGINE_LOST_PAUSE_SECONDS = 1.0
"""Delay before a group is requeued after its engine or router was lost, or after an engine aborted its requests on its
own. The next health check has to notice the loss."""


class Outcome(Enum):
    """The result of an attempt."""

    KEPT = auto()
    FILTERED = auto()
    ABORTED = auto()
    FAILED = auto()


@dataclass(kw_only=True, eq=False, repr=False)
class Attempts:
    """Makes attempts at groups, and aborts them. Many attempts are in progress at a time."""

    run_state: RunState
    lifecycle: GroupLifecycle
    tasks: TaskSupervisor
    generator: Generator
    engines: EngineChecks
    grading: Grading
    head_policy: HeadPolicy
    partial_rollout: bool
    """An aborted attempt keeps its tokens for the next one."""
    sample_display: SampleDisplay

    def __post_init__(self) -> None:
        self._quarantine = self.lifecycle.quarantine
        self.generating: dict[int, Group] = {}
        """Groups at the engines, by sequence number."""
        self.at_engines_since: dict[int, float] = {}
        """When each of these groups was sent to the engines (`Clock.monotonic`), by sequence number, oldest first."""
        self.rewarding = 0
        """Number of groups that are generated and wait for their reward."""
        self._overdue: set[int] = set()
        """Groups that the head policy aborted and whose attempts have not ended yet."""
        self._salvaged: dict[str, int] = {}
        """Tokens that the unfinished samples had when their group was salvaged, by feed index."""
        self._stopping = False
        self._aborts = 0
        """Calls of `aborting` since the run began."""

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Let no attempt continue inside the block, including those that have not reached the engines yet."""
        self._stopping = True
        self._aborts += 1
        try:
            yield
        finally:
            self._stopping = False

    async def abort_requests(self) -> None:
        """Abort everything that the engines generate."""
        # Requests at a lost engine cannot be aborted; they fail when its process ends.
        with suppress(EngineLostError):
            await self.generator.abort()

    async def abort_overdue(self, sequence: int) -> None:
        """Abort the head of the window, whose deadline has passed. Does nothing if it is not at the engines now."""
        if group := self.generating.get(sequence):
            self._overdue.add(sequence)
            with suppress(EngineLostError):
                await self.generator.abort(group)

    async def make(self, group: Group) -> bool:
        """Make one attempt. Returns whether the group is kept; if not, the lifecycle has recorded the end."""
        sequence, aborts_before = sequence_of(group), self._aborts
        try:
            outcome = await self._generate_and_grade(group)
        except (TrajectoryError, EngineLostError) as error:
            outcome = Outcome.FAILED
            await self._fail(group, error)
        if outcome is Outcome.ABORTED:
            await self._requeue_aborted(group, by_run=self._stopping or self._aborts != aborts_before)
        elif outcome is Outcome.FILTERED:
            self.lifecycle.drop(group, DropReason.FILTERED)
        self._overdue.discard(sequence)
        self._quarantine.end_trial(group)
        if outcome is Outcome.KEPT:
            self._salvaged.pop(group.feed_index, None)
        return outcome is Outcome.KEPT

    async def _generate_and_grade(self, group: Group) -> Outcome:
        """Generate, score and filter. Raises TrajectoryError or EngineLostError instead of returning FAILED."""
        clock, sequence = self.run_state.clock, sequence_of(group)
        if self._quarantine.suspects(group):
            # The trial must not be lost at an engine that another group crashed a moment ago.
            await self.engines.check_all()
            await self.run_state.changed.until(lambda: self._stopping or self.engines.serving())
        if self._stopping:
            return Outcome.ABORTED
        started = clock.monotonic()
        self.generating[sequence] = group
        self.at_engines_since[sequence] = started
        try:
            await self._generate(group)
        except InfrastructureError as error:
            if self._stopping:
                return Outcome.ABORTED
            self.grading.leave_out(group, error)
        finally:
            del self.generating[sequence], self.at_engines_since[sequence]
        if group.aborted:
            return Outcome.ABORTED
        # The engines survived the prompt, whatever the group is worth.
        self._quarantine.clear(group)
        return await self._grade(group, clock.monotonic() - started)

    async def _grade(self, group: Group, generation_seconds: float) -> Outcome:
        clock, journal = self.run_state.clock, self.run_state.journal
        self.grading.check(group)
        generated = clock.monotonic()
        self.rewarding += 1
        try:
            await self.grading.score(group, lambda: self._stopping)
        finally:
            self.rewarding -= 1
        verdict = self.grading.filter(group)
        event = generated_event(group, clock.time(), generation_seconds, clock.monotonic() - generated)
        if not verdict.keep:
            journal.emit(GroupFiltered(time=clock.time(), sequence=sequence_of(group), reason=verdict.reason))
        journal.emit(event)
        self.run_state.durations.record(event.generation_seconds + event.reward_seconds, event.sequence)
        self.sample_display.offer(group)
        return Outcome.KEPT if verdict.keep else Outcome.FILTERED

    async def _generate(self, group: Group) -> None:
        """Generate the group, and again after each publish that aborts it.

        The group keeps its sequence number. The trainer cannot run ahead of the head of the window by more than the
        window and the slots allow, so publishes stop until the group has ended, however long it takes.
        """
        run_state = self.run_state
        while True:
            aborts_before = run_state.publish_aborts
            await self.generator.generate(group)
            by_publish = run_state.publish_is_aborting or run_state.publish_aborts != aborts_before
            if not group.aborted or not by_publish or self._stopping or sequence_of(group) in self._overdue:
                return
            if not self.partial_rollout:
                for sample in group:
                    if sample.status is SampleStatus.ABORTED:
                        tokens, cause = sample.response_length, "a publish aborted the request"
                        run_state.journal.report_discarded(group, sample, "publish", tokens, cause)
                        sample.reset()

    async def _fail(self, group: Group, error: TrajectoryError | EngineLostError) -> None:
        match error:
            case PromptTooLongError():
                self.lifecycle.dead_letter(group, DropReason.PROMPT_TOO_LONG, str(error))
            case TrajectoryError():
                self._quarantine.clear(group)
                for sample in error.samples:
                    sample.status = SampleStatus.FAILED
                # An error that names no sample may be the fault of any.
                self.lifecycle.fail(
                    group,
                    str(error),
                    keeps_finished=bool(error.samples),
                    may_pass=isinstance(error, InfrastructureError),
                )
            case EngineLostError():
                if not self._stopping:
                    # A dead engine has the fewest requests, so the router prefers it until the check has fenced it.
                    self.tasks.spawn("check-engines", self.engines.check_all())
                    await self.run_state.clock.sleep(ENGINE_LOST_PAUSE_SECONDS)
                if isinstance(error, RouterLostError):
                    self.lifecycle.requeue(group, DropReason.ROUTER_LOST, keeps_finished=True)
                else:
                    self.lifecycle.handle_engine_loss(group, str(error))

    async def _requeue_aborted(self, group: Group, *, by_run: bool) -> None:
        """Requeue an aborted group: with its tokens, or as a fresh attempt."""
        if sequence_of(group) in self._overdue:
            self._requeue_overdue(group)
        elif not by_run:
            # Without a pause and a limit, the group would be requeued forever, thousands of times a second.
            await self.run_state.clock.sleep(ENGINE_LOST_PAUSE_SECONDS)
            sentence = "its requests ended with an abort that the run did not ask for"
            self.lifecycle.retry(group, DropReason.ABORTED, sentence, keeps_finished=True)
        elif self.partial_rollout and group.response_tokens:
            # Finished samples of the group keep their tokens too, because a group is trained as a whole.
            self.lifecycle.salvage(group, DropReason.PARTIAL)
        else:
            self.lifecycle.requeue(group, DropReason.ABORTED)

    def _requeue_overdue(self, group: Group) -> None:
        salvages = self.head_policy.action is HeadAction.SALVAGE
        tokens = sum(sample.response_length for sample in group if not sample.finished)
        if salvages and tokens > self._salvaged.pop(group.feed_index, 0):
            self._salvaged[group.feed_index] = tokens
            self.lifecycle.salvage(group, DropReason.HEAD_DEADLINE)
        else:
            # An agent that starts again has no more tokens than before. Its attempts are limited.
            self.lifecycle.retry(
                group,
                DropReason.HEAD_DEADLINE,
                f"it blocked the window for {self.head_policy.deadline_seconds:g}s (--head-deadline-seconds)",
                keeps_finished=salvages,
            )
