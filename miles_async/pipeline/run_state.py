"""The state that the loops share: ledger, weight versions, time of the last progress, and the journal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from weakref import ref

from miles_async.errors import LedgerError
from miles_async.events import GroupFiltered, GroupMoved, SampleDiscarded
from miles_async.identity import WeakIdentityMap
from miles_async.pipeline.journal import Journal
from miles_async.pipeline.tasks import ChangeSignal
from miles_async.ports import Clock
from miles_async.scheduling.ledger import LIVE, GroupState, Ledger, Transition
from miles_async.scheduling.lineage import Lineage
from miles_async.scheduling.quarantine import Quarantine
from miles_async.types import DropReason, Group, Sample


class TakenGroup(NamedTuple):
    """A group that a rollout function took from the data source."""

    copy: Group
    """The group as it was when it was taken."""
    samples: list[ref[Sample]]
    """The samples that the function received."""
    version: int
    """The live weight version when it was taken."""
    time: float
    """When it was taken (`Clock.monotonic`)."""

    @property
    def in_use(self) -> bool:
        """Whether anything still refers to one of the samples."""
        return any(sample() is not None for sample in self.samples)


class _StoredSamples(NamedTuple):
    """The samples of a restored group, which stay in the store until they are needed."""

    load: Callable[[], Awaitable[list[Sample]]]
    response_tokens: int


class RunState:
    """Owns the ledger, and records each of its transitions in the journal, with an event. There is one per run.

    All methods are called from the event loop, except those of the groups that a rollout function takes or collects:
    `record_taken`, `record_collected`, `record_returned`, `record_given_back`, `collected_groups`, `held_groups`,
    `taken_as`, `identify` and `is_handed_on`. A rollout function may run in its own thread, so these are called with
    `journal.data_lock` held.
    """

    def __init__(self, clock: Clock, journal: Journal) -> None:
        self.ledger = Ledger()
        self.quarantine = Quarantine()
        self.changed = ChangeSignal()
        """Notified at every transition and publish. No loop waits for anything else inside the run."""
        self.clock = clock
        self.journal = journal
        self.announced_version = 0
        """Newest weight version that was staged or is about to be. Stored before it is staged, so that no version is
        ever used for two different weights."""
        self.trainer_version = 0
        """Newest weight version that was staged, live or not."""
        self.weights_changed = False
        """Whether the learner's weights are newer than `trainer_version`."""
        self.live_version = -1
        """Newest weight version on every routed engine; -1 before the first publish."""
        self.evaluation_requests = 0
        """Problems of evaluations that are at the engines."""
        self.lineage = Lineage()
        """Which versions the current weights descend from."""
        self.publish_aborts = 0
        """Publishes that have aborted the requests at the engines (`pause_generation_mode` abort)."""
        self.publish_is_aborting = False
        """Whether a publish is aborting the requests at the engines now."""
        self.waits_for_groups = False
        """Whether the training loop waits for a batch, an evaluation or the last groups, and not for the learner or a
        publish."""
        self._last_progress = self._last_moved = clock.monotonic()
        """When the run made progress last: of any kind, and of another kind than tokens of the engines."""
        self._working = 0
        """Number of `working` blocks that are entered now."""
        self._live: dict[int, Group] = {}
        """Live groups by sequence number."""
        self._taken: dict[str, TakenGroup] = {}
        """Groups that a rollout function took, by feed index."""
        self._taken_samples: WeakIdentityMap[Sample, str] = WeakIdentityMap()
        """The feed index of the taken group of each sample. The function alone decides how long the sample lives."""
        self._collected: dict[int, Group] = {}
        """Groups that a rollout function collected and has neither returned nor given back, by sequence number."""
        self._given_back: list[tuple[Group, Group]] = []
        """Groups that a rollout function collected and gave back, and the groups that the data source has instead."""
        self._handed_on: set[str] = set()
        """Feed indices of groups that a rollout function held, and that it returned or gave back. There is one for each
        prompt, so that a group that comes a second time, however late, is recognised."""
        self._adopted: set[int] = set()
        """Sequence numbers of live groups that were generated outside the pipeline."""
        self._unloaded: dict[int, _StoredSamples] = {}
        """The samples of restored groups, by sequence number; see `leave_in_store`."""

    @property
    def live_groups(self) -> list[Group]:
        """Groups that are fed and neither published nor dropped yet, in feed order."""
        return list(self._live.values())

    @property
    def leased_groups(self) -> list[Group]:
        """Groups of batches that are not trained yet."""
        return [group for group in self._live.values() if self.state_of(group) is GroupState.LEASED]

    @property
    def taken_groups(self) -> list[Group]:
        """Groups that a rollout function took from the data source and holds, in the state in which it took them."""
        return [taken.copy for taken in self._taken.values()]

    @property
    def taken_count(self) -> int:
        """Number of `taken_groups`."""
        return len(self._taken)

    def record_taken(self, groups: Iterable[Group]) -> None:
        """Remember copies of groups that a rollout function takes, because it may change the groups at any time."""
        for group in groups:
            samples = [replace(sample, metadata=dict(sample.metadata), tokens=list(sample.tokens)) for sample in group]
            copy = Group(samples, feed_index=group.feed_index, attempt=group.attempt)
            samples_taken = [ref(sample) for sample in group]
            now = self.clock.monotonic()
            self._forget_taken(group.feed_index)
            self._taken[group.feed_index] = TakenGroup(copy, samples_taken, self.live_version, now)
            for sample in group:
                self._taken_samples[sample] = group.feed_index
            self._handed_on.discard(group.feed_index)
            self.journal.owe(copy)

    def record_returned(self, groups: Sequence[Group]) -> None:
        """Forget groups that a rollout function returned, to the data source or as its result."""
        self._hand_on(groups)
        for group in groups:
            self._forget_taken(Group.of(group).feed_index)
            # A function may return new lists of the samples, which have no feed index.
            for sample in group:
                if (taken := self._taken_with(sample)) is not None:
                    self._forget_taken(taken.copy.feed_index)

    def _forget_taken(self, feed_index: str) -> TakenGroup | None:
        """Remove and return the taken group of this name, if there is one."""
        taken = self._taken.pop(feed_index, None)
        for sample in () if taken is None else filter(None, (taken_sample() for taken_sample in taken.samples)):
            # The function may have put the sample into another group that it took.
            if self._taken_samples.get(sample) == feed_index:
                self._taken_samples.pop(sample)
        return taken

    def _taken_with(self, sample: Sample) -> TakenGroup | None:
        """The taken group that contains `sample` itself, and not a copy of it."""
        return self._taken.get(self._taken_samples.get(sample) or "")

    @property
    def collected_groups(self) -> list[Group]:
        """Groups that a rollout function collected and has neither returned nor given back."""
        return list(self._collected.values())

    def record_collected(self, groups: Iterable[Group]) -> None:
        """Remember groups that a rollout function collects, because it may give some of them back."""
        for group in groups:
            self._collected[sequence_of(group)] = group
            self._handed_on.discard(group.feed_index)

    def record_given_back(self, group: Group, fed_again: Group) -> None:
        """Remember that a rollout function gave back the collected `group`; the data source has `fed_again` instead.

        The attempt ends in the event loop, see `end_given_back`.
        """
        self._hand_on([group])
        self._given_back.append((group, fed_again))

    def _hand_on(self, groups: Iterable[Group]) -> None:
        """Remember the names of those groups that a rollout function held."""
        for group in groups:
            collected = None if group.sequence is None else self._collected.pop(group.sequence, None)
            if collected is not None or group.feed_index in self._taken:
                self._handed_on.add(group.feed_index)

    def is_collected(self, group: Group) -> bool:
        """Whether a rollout function holds the group, which has a sequence number."""
        return group.sequence in self._collected

    def is_handed_on(self, group: Group) -> bool:
        """Whether a rollout function held the group before, and has returned it or given it back."""
        return bool(group.feed_index) and group.feed_index in self._handed_on

    def end_given_back(self) -> None:
        """End the attempts at groups that a rollout function gave back: the slots are free, and the prompts are owed.

        It is called in the event loop, with `journal.data_lock` held.
        """
        for group, fed_again in self._given_back:
            tokens = min(group.response_tokens, fed_again.response_tokens)
            self.drop(group, DropReason.GIVEN_BACK, kept_tokens=tokens)
            # The function may have taken the prompt from the data source again.
            taken = self._taken.get(fed_again.feed_index)
            self.owe(fed_again if taken is None else taken.copy)
        self._given_back.clear()

    def close_collected(self) -> None:
        """Record that a rollout function has returned: from now on it cannot give back what it collected before."""
        with self.journal.data_lock:
            self.end_given_back()
            self._hand_on(self.collected_groups)

    @property
    def held_groups(self) -> int:
        """Number of groups that count against the limit of a worker: those that it holds, and those that are trained.

        A group is held while anything refers to its samples.
        """
        counts = self.ledger.counts
        in_batches = counts[GroupState.QUEUED] + counts[GroupState.LEASED] + counts[GroupState.TRAINED]
        return in_batches + sum(taken.in_use for taken in self._taken.values())

    def taken_as(self, sample: Sample) -> TakenGroup | None:
        """The taken group that `sample`, or the sample of which it is a copy, belongs to; None if it was not taken."""
        named = self._taken.get(sample.metadata.get("feed_index", ""))
        return named or self._taken_with(sample)

    def identify(self, group: Group) -> TakenGroup | None:
        """Restore the name and the attempt of a taken group, because functions return new lists of its samples.

        Samples that the function left out become `missing`. Returns the group as it was taken, or None if it was not
        taken.
        """
        taken = self.taken_as(group[0]) if group else None
        if taken is not None:
            group.feed_index, group.attempt = taken.copy.feed_index, taken.copy.attempt
            group.complete(taken.copy.prompts)
        return taken

    def age_of(self, group: Group) -> int:
        """Staleness of the group now: the age of its oldest token in weight updates. Raises as `Group.versions`."""
        return self.lineage.oldest_age(group.versions, self.trainer_version)

    def state_of(self, group: Group) -> GroupState | None:
        """The live state of an admitted group; None if it has ended."""
        return self.ledger.state(sequence_of(group))

    def mark_progress(self) -> None:
        """Restart the clock that detects stalls: a group was collected, a step ended or the learner has worked."""
        self._last_progress = self._last_moved = self.clock.monotonic()

    def mark_tokens(self, within: float) -> None:
        """Restart the clock because the engines generate, up to `within` seconds after progress of another kind.

        A request may take no longer. So a run whose requests are lost or repeated again and again ends.
        """
        if (now := self.clock.monotonic()) - self._last_moved < within:
            self._last_progress = now

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time inside the block as progress, because the pipeline cannot see whether the work advances."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self.mark_progress()

    def discount(self, seconds: float) -> None:
        """Leave out of `idle_seconds` the last `seconds`, in which this process did not run."""
        now = self.clock.monotonic()
        self._last_progress = min(self._last_progress + seconds, now)
        self._last_moved = min(self._last_moved + seconds, now)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last progress; 0 inside `working`."""
        return 0.0 if self._working else self.clock.monotonic() - self._last_progress

    def feed(self, group: Group) -> None:
        """Enter a group that was taken from the data source, and assign its sequence number."""
        # A rollout function may have given the group back with tokens.
        self._enter(group, self._new_attempt(), kept_tokens=group.response_tokens)

    def _new_attempt(self) -> Transition:
        # The attempts of groups that were given back end first, so that no prompt has two.
        with self.journal.data_lock:
            self.end_given_back()
        return self.ledger.feed()

    def _enter(self, group: Group, transition: Transition, *, kept_tokens: int = 0) -> None:
        group.sequence = transition.sequence
        self._live[transition.sequence] = group
        self._record(group, transition, kept_tokens=kept_tokens)

    def adopt(self, group: Group) -> None:
        """Enter a finished group that was generated outside the pipeline; it is leased at once."""
        transition = self._new_attempt()
        self._adopted.add(transition.sequence)
        self._enter(group, transition)
        for state in (GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED, GroupState.LEASED):
            self.advance([group], state)

    def replace(self, group: Group, rebuilt: Group) -> None:
        """Let `rebuilt`, a new list of the samples of the live `group`, take the place of `group`."""
        assert group.sequence is not None
        rebuilt.sequence, rebuilt.feed_index, rebuilt.attempt = group.sequence, group.feed_index, group.attempt
        rebuilt.complete(group.prompts)
        self._live[group.sequence] = rebuilt

    def take_unused(self) -> list[Group]:
        """Remove and return the taken groups whose samples nothing refers to any more, as they were when taken.

        A worker thread of the user may still hold other groups, which a later call of the function returns.
        """
        with self.journal.data_lock:
            unused = [name for name, taken in self._taken.items() if not taken.in_use]
            return [taken.copy for taken in map(self._forget_taken, unused) if taken is not None]

    def advance(self, groups: Iterable[Group], state: GroupState, *, rollout: int | None = None) -> None:
        """Move groups to their next state. `rollout` is that of the batch if they were trained."""
        for group in groups:
            self._record(group, self.ledger.advance(sequence_of(group), state), rollout)

    def drop(self, group: Group, reason: DropReason, *, kept_tokens: int = 0) -> None:
        """End the group's attempt without training, and with it the debt of its prompt; see `owe`.

        `kept_tokens` is the number of response tokens that the next attempt has from the beginning.
        """
        unloaded = self._unloaded.pop(sequence_of(group), None)
        tokens = group.response_tokens if unloaded is None else unloaded.response_tokens
        transition = self.ledger.drop(sequence_of(group), reason)
        self._record(group, transition, discarded_tokens=tokens - kept_tokens, kept_tokens=kept_tokens)

    def discard(self, group: Group, sample: Sample, reason: str, error: str) -> None:
        """Record that the response of a sample will not be trained, while its group goes on."""
        self.journal.emit(
            SampleDiscarded(
                time=self.clock.time(),
                sequence=group.sequence,
                sample=sample.index,
                reason=reason,
                tokens=sample.response_length,
                error=error,
            )
        )

    def owe(self, group: Group) -> None:
        """Record that the prompt of a dropped group returns to the data source or waits for its trial."""
        self.journal.owe(group)

    def give_back(self, group: Group) -> None:
        """Return a group of a batch that will not be trained to the queue."""
        self._record(group, self.ledger.give_back(sequence_of(group)))

    def roll_back(self, group: Group) -> None:
        """Return a group to the queue whose training was lost with the learner."""
        self._record(group, self.ledger.roll_back(sequence_of(group)))
        self._live[sequence_of(group)] = group

    def restore(self, group: Group) -> None:
        """Enter a live group of a stored run, whose state the ledger has."""
        self._live[sequence_of(group)] = group

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

    def drop_filtered(self, group: Group, reason: str) -> None:
        """Drop a group that a filter or a rollout function rejected for `reason`."""
        self.journal.emit(GroupFiltered(time=self.clock.time(), sequence=sequence_of(group), reason=reason))
        self.drop(group, DropReason.FILTERED)
        # Nothing owes the prompt any more, so a rollout function that still holds the group may give it back.
        self._handed_on.discard(group.feed_index)

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
        self.journal.move(group, transition, adopted=transition.sequence in self._adopted, rollout=rollout)
        if transition.after not in LIVE:
            del self._live[transition.sequence]
            self._adopted.discard(transition.sequence)
            self._unloaded.pop(transition.sequence, None)
        self.journal.emit(
            GroupMoved(
                time=self.clock.time(),
                sequence=transition.sequence,
                feed_index=group.feed_index,
                attempt=group.attempt,
                before=transition.before,
                after=transition.after,
                reason=transition.reason,
                counts={state: counts[state] for state in LIVE if counts[state]},
                discarded_tokens=discarded_tokens,
                kept_tokens=kept_tokens,
            )
        )
        self.changed.notify()


def sequence_of(group: Group) -> int:
    """The group's sequence number. Raises LedgerError if the group was never admitted."""
    if group.sequence is None:
        raise LedgerError(f"group {group.feed_index} was never admitted; report this bug")
    return group.sequence
