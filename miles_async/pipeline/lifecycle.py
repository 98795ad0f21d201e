"""The lifecycle of groups: starts attempts, records each change of state, and decides what follows a failed attempt.

    feed, adopt            an attempt begins and gets the next sequence number
    advance                it reaches the next state of `scheduling/ledger.py`
    drop, reject           it ends, and the prompt is not needed any more
    requeue, salvage       it ends, and the prompt did not cause the end: the prompt gets another attempt
    retry, fail            it ends and is counted: another attempt, or a dead letter after `--max-attempts`
    handle_engine_loss     it ends with its engine: another attempt, from the second loss on in quarantine
    dead_letter            it ends, and every further attempt would fail the same way
    give_back, roll_back   its training was lost, and it returns to the queue

The next attempt at a prompt is first in line at the data source, or waits in quarantine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from miles_async.errors import LedgerError, UserError
from miles_async.events import GroupFiltered, GroupMoved
from miles_async.pipeline.run_state import RunState
from miles_async.ports import DataSource, DeadLetters
from miles_async.scheduling.ledger import LIVE, GroupState, Ledger, Transition
from miles_async.scheduling.quarantine import ALONE_LOSSES, CULPRIT_LOSSES, Quarantine
from miles_async.types import DropReason, Group, Sample, SampleStatus


class _StoredSamples(NamedTuple):
    """The samples of a restored group, which stay in the store until they are needed."""

    load: Callable[[], Awaitable[list[Sample]]]
    response_tokens: int


@dataclass(eq=False, repr=False)
class GroupLifecycle:
    """Owns the ledger and the live groups. Each transition is in the journal, with an event. There is one per run.

    Attempts are limited, so that no prompt is generated forever. All methods are called from the event loop.
    """

    run_state: RunState
    data: DataSource
    dead_letters: DeadLetters
    max_attempts: int
    first_attempts: int
    """The run ends if so many attempts fail before one succeeds: the fault is then not in the prompts."""

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.quarantine = Quarantine()
        self.recycled = 0
        """Number of groups recycled as stale since the run began."""
        self.before_attempt: Callable[[], None] = lambda: None
        """Called before an attempt begins. It ends what has ended outside the pipeline, so that no prompt has two."""
        self._journal = self.run_state.journal
        self._failures = 0
        """Failed attempts before the first success."""
        self._faults = 0
        """Those of them whose cause was not infrastructure."""
        self._succeeded = False
        self._live: dict[int, Group] = {}
        """Live groups by sequence number."""
        self._adopted: set[int] = set()
        """Sequence numbers of live groups that were generated outside the pipeline."""
        self._unloaded: dict[int, _StoredSamples] = {}
        """The samples of restored groups, by sequence number; see `leave_in_store`."""

    @property
    def live_groups(self) -> list[Group]:
        """Groups that are fed and neither published nor dropped yet, in feed order."""
        return list(self._live.values())

    def groups_in(self, state: GroupState) -> list[Group]:
        """The groups in this live state, in feed order."""
        return [group for group in self._live.values() if self.state_of(group) is state]

    def state_of(self, group: Group) -> GroupState | None:
        """The live state of an admitted group; None if it has ended."""
        return self.ledger.state(sequence_of(group))

    def feed_next(self, adapter: str = "") -> list[Group]:
        """Feed the next prompt: a suspect whose trial is due, or else the first of the data source for an adapter.

        Returns an empty list if there is none now.
        """
        suspect = self.quarantine.release()
        groups = self.data.get_samples(1, adapter) if suspect is None else [suspect]
        for group in groups:
            self.feed(group)
        return groups

    def feed(self, group: Group) -> None:
        """Begin an attempt at a group that was taken from the data source."""
        self.before_attempt()
        # A rollout function may have given the group back with tokens.
        self._enter(group, self.ledger.feed(self.run_state.adapter_of(group)), kept_tokens=group.response_tokens)

    def adopt(self, group: Group) -> None:
        """Enter a finished group that was generated outside the pipeline; it is leased at once."""
        self.before_attempt()
        transition = self.ledger.feed(self.run_state.adapter_of(group))
        self._adopted.add(transition.sequence)
        self._enter(group, transition)
        for state in (GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED, GroupState.LEASED):
            self.advance([group], state)

    def register(self, group: Group) -> None:
        """Enter a group whose state the ledger has: one of a stored run, or another list of a live group's samples."""
        self._live[sequence_of(group)] = group

    def advance(self, groups: Iterable[Group], state: GroupState, *, rollout: int | None = None) -> None:
        """Move groups to their next state. `rollout` is that of the batch if they were trained."""
        for group in groups:
            self._record(group, self.ledger.advance(sequence_of(group), state), rollout)

    def give_back(self, group: Group) -> None:
        """Return a group of a batch that will not be trained to the queue."""
        self._record(group, self.ledger.give_back(sequence_of(group)))

    def roll_back(self, group: Group) -> None:
        """Return a group to the queue whose training was lost with the learner."""
        adapter = self.run_state.adapter_of(group)
        self._record(group, self.ledger.roll_back(sequence_of(group), adapter))
        self.register(group)

    def leave_in_store(
        self, group: Group, load: Callable[[], Awaitable[list[Sample]]], response_tokens: int = 0
    ) -> None:
        """Record that a restored group contains only its prompt and its weight versions.

        `load` returns its samples, which have `response_tokens` response tokens.
        """
        self._unloaded[sequence_of(group)] = _StoredSamples(load, response_tokens)

    async def load(self, group: Group) -> None:
        """Load the samples of a restored group from the store. Does nothing if the group is complete."""
        if (samples := self._unloaded.get(sequence_of(group))) is not None:
            prompts = group.prompts
            group[:] = await samples.load()
            group.complete(prompts)
            self._unloaded.pop(sequence_of(group), None)

    def drop(self, group: Group, reason: DropReason, *, kept_tokens: int = 0) -> None:
        """End the group's attempt without training. The store forgets the prompt.

        `kept_tokens` is the number of response tokens that the next attempt has from the beginning.
        """
        unloaded = self._unloaded.pop(sequence_of(group), None)
        tokens = group.response_tokens if unloaded is None else unloaded.response_tokens
        transition = self.ledger.drop(sequence_of(group), reason)
        self._record(group, transition, discarded_tokens=tokens - kept_tokens, kept_tokens=kept_tokens)

    def reject(self, group: Group, reason: str) -> None:
        """Drop a group that a filter or a rollout function rejected for `reason`."""
        self._journal.emit(GroupFiltered(time=self.run_state.clock.time(), sequence=sequence_of(group), reason=reason))
        self.drop(group, DropReason.FILTERED)

    def fail(self, group: Group, error: str, *, keeps_finished: bool = False, may_pass: bool = False) -> None:
        """End an attempt whose generation, reward or filter failed, as `retry` does.

        `may_pass` means that the cause is infrastructure, which may recover. Raises UserError if `first_attempts`
        attempts have failed for other causes, and no sample has succeeded.
        """
        self._succeeded |= self.ledger.has_finished or (keeps_finished and group.finished_tokens > 0)
        self.retry(group, DropReason.FAILED, error, keeps_finished=keeps_finished)
        if self._succeeded:
            return
        if not self._failures:
            then = "" if may_pass else f"; the run ends if the first {self.first_attempts} attempts fail"
            self._journal.warn(f"every sample of the first group failed: {error}{then}")
        self._failures += 1
        self._faults += not may_pass
        if self._faults >= self.first_attempts:
            raise UserError(
                f"all of the first {self._failures} attempts to generate a group failed; correct the function or the "
                f"setting that the last error names: {error}"
            )

    def retry(self, group: Group, reason: DropReason, error: str, *, keeps_finished: bool = False) -> None:
        """End the attempt and count it. The prompt is requeued, or dead-lettered after its last attempt.

        With `keeps_finished`, the next attempt generates only the samples that are not finished.
        """
        self.recycled += reason is DropReason.STALE
        if group.attempt + 1 >= self.max_attempts:
            self.dead_letter(group, reason, error)
            return
        self._end(group, reason, keeps_finished)
        group.attempt += 1
        self._return(group)

    def requeue(self, group: Group, reason: DropReason, *, keeps_finished: bool = False) -> None:
        """End the attempt without counting it, because the prompt did not cause the end. The prompt is requeued.

        `keeps_finished` is as in `retry`.
        """
        self._end(group, reason, keeps_finished)
        self._return(group)

    def salvage(self, group: Group, reason: DropReason) -> None:
        """End the attempt but keep its tokens, which the next attempt continues; their weight versions stay."""
        self.drop(group, reason, kept_tokens=group.response_tokens)
        group.put_back()
        for sample in group:
            if sample.status is SampleStatus.FAILED:
                sample.reset()
        group.sequence = None
        self._return(group)

    def handle_engine_loss(self, group: Group, error: str) -> None:
        """Requeue a group whose engine was lost, or dead-letter a prompt that is proven to crash engines."""
        losses = self.quarantine.count_loss(group)
        if losses < CULPRIT_LOSSES:
            self.requeue(group, DropReason.ENGINE_LOST, keeps_finished=True)
            return
        alone = CULPRIT_LOSSES - ALONE_LOSSES
        sentence = f"its engine was lost {losses} times, {alone} of them while nothing else was generated: {error}"
        self.dead_letter(group, DropReason.ENGINE_LOST, sentence)

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        """End the attempt and dead-letter the prompt, because every further attempt would fail the same way."""
        self.drop(group, reason)
        self.dead_letters.dead_letter(group, reason, error)

    def _enter(self, group: Group, transition: Transition, *, kept_tokens: int = 0) -> None:
        group.sequence = transition.sequence
        self.register(group)
        self._record(group, transition, kept_tokens=kept_tokens)

    def _end(self, group: Group, reason: DropReason, keeps_finished: bool) -> None:
        self.drop(group, reason, kept_tokens=group.finished_tokens if keeps_finished else 0)
        group.reset(keeps_finished=keeps_finished)

    def _return(self, group: Group) -> None:
        """Put the prompt first in line; a prompt that may crash engines waits for its trial instead."""
        self._journal.track_prompt(group)
        if self.quarantine.suspects(group):
            self.quarantine.hold(group)
        else:
            self.data.add_samples([group])

    def _record(
        self,
        group: Group,
        transition: Transition,
        rollout: int | None = None,
        *,
        discarded_tokens: int = 0,
        kept_tokens: int = 0,
    ) -> None:
        counts = self.ledger.counts
        self._journal.move(group, transition, adopted=transition.sequence in self._adopted, rollout=rollout)
        if transition.after not in LIVE:
            del self._live[transition.sequence]
            self._adopted.discard(transition.sequence)
            self._unloaded.pop(transition.sequence, None)
        self._journal.emit(
            GroupMoved(
                time=self.run_state.clock.time(),
                sequence=transition.sequence,
                feed_index=group.feed_index,
                attempt=group.attempt,
                before=transition.before,
                after=transition.after,
                reason=transition.reason,
                counts={state: counts[state] for state in LIVE if counts[state]},
                discarded_tokens=discarded_tokens,
                kept_tokens=kept_tokens,
                dataset=group.dataset,
                adapter=self.run_state.adapter_of(group),
            )
        )
        self.run_state.changed.notify()


def sequence_of(group: Group) -> int:
    """The group's sequence number. Raises LedgerError if the group was never admitted."""
    if group.sequence is None:
        raise LedgerError(f"group {group.feed_index} was never admitted; report this bug")
    return group.sequence
