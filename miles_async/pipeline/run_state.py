"""The state that the loops share: ledger, weight versions, time of the last progress, and the event stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import NamedTuple
from weakref import ref

from miles_async.errors import LedgerError
from miles_async.events import EventSink, GroupFiltered, GroupMoved
from miles_async.pipeline.tasks import ChangeSignal
from miles_async.ports import Clock
from miles_async.scheduling.ledger import LIVE, GroupState, Ledger, Transition
from miles_async.scheduling.quarantine import Quarantine
from miles_async.types import DropReason, Group, Sample


class _TakenGroup(NamedTuple):
    """A group that a rollout function took from the data source."""

    copy: Group
    """The group as it was when it was taken."""
    samples: list[ref[Sample]]
    """The samples that the function received."""

    @property
    def in_use(self) -> bool:
        """Whether anything still refers to one of the samples."""
        return any(sample() is not None for sample in self.samples)


class RunState:
    """Owns the ledger and emits an event for each of its transitions. There is one per run.

    All methods are called from the event loop, except `record_taken` and `record_returned`: a rollout function may run
    in its own thread, so these two are called with `data_lock` held.
    """

    def __init__(self, clock: Clock, events: EventSink) -> None:
        self.ledger = Ledger()
        self.quarantine = Quarantine()
        self.changed = ChangeSignal()
        """Notified at every transition and publish. No loop waits for anything else inside the run."""
        self.clock = clock
        self.events = events
        self.trainer_version = 0
        """Newest weight version that was staged, live or not."""
        self.live_version = -1
        """Newest weight version on every routed engine; -1 before the first publish."""
        self.evaluation_requests = 0
        """Problems of evaluations that are at the engines."""
        self.publish_aborts = 0
        """Publishes that aborted the requests at the engines (`pause_generation_mode` abort)."""
        self._last_progress = clock.monotonic()
        self._working = 0
        """Number of `working` blocks that are entered now."""
        self.data_lock = Lock()
        """Held while a rollout function takes prompts from the data source or returns them."""
        self._live: dict[int, Group] = {}
        """Live groups by sequence number."""
        self._taken: dict[str, _TakenGroup] = {}
        """Groups that a rollout function took, by feed index."""

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

    def record_taken(self, groups: Iterable[Group]) -> None:
        """Remember copies of groups that a rollout function takes, because it may change the groups at any time."""
        for group in groups:
            samples = [replace(sample, metadata=dict(sample.metadata), tokens=list(sample.tokens)) for sample in group]
            copy = Group(samples, feed_index=group.feed_index, attempt=group.attempt)
            self._taken[group.feed_index] = _TakenGroup(copy, [ref(sample) for sample in group])

    def record_returned(self, groups: Iterable[Group]) -> None:
        """Forget groups that a rollout function returned, to the data source or as its result."""
        names, samples = set(), set()
        for group in groups:
            names.add(Group.of(group).feed_index)
            samples |= set(map(id, group))
        for name, taken in list(self._taken.items()):
            # A function may return new lists of the samples, which have no feed index.
            if name in names or not samples.isdisjoint(id(sample()) for sample in taken.samples):
                del self._taken[name]

    def state_of(self, group: Group) -> GroupState | None:
        """The live state of an admitted group; None if it has ended."""
        return self.ledger.state(sequence_of(group))

    def mark_progress(self) -> None:
        """Restart the clock that detects stalls: a group was collected, a step ended or the learner has worked."""
        self._last_progress = self.clock.monotonic()

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
        self._last_progress = min(self._last_progress + seconds, self.clock.monotonic())

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last progress; 0 inside `working`."""
        return 0.0 if self._working else self.clock.monotonic() - self._last_progress

    def feed(self, group: Group) -> None:
        """Enter a group that was taken from the data source, and assign its sequence number."""
        transition = self.ledger.feed()
        group.sequence = transition.sequence
        self._live[transition.sequence] = group
        self._emit(group, transition)

    def adopt(self, group: Group) -> None:
        """Enter a finished group that was generated outside the pipeline; it is leased at once."""
        self.feed(group)
        for state in (GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED, GroupState.LEASED):
            self.advance([group], state)

    def replace(self, group: Group, rebuilt: Group) -> None:
        """Let `rebuilt`, a new list of the samples of the live `group`, take the place of `group`."""
        assert group.sequence is not None
        rebuilt.sequence, rebuilt.feed_index, rebuilt.attempt = group.sequence, group.feed_index, group.attempt
        self._live[group.sequence] = rebuilt

    def forget_unused(self) -> None:
        """Forget the taken groups whose samples nothing refers to any more: the rollout function has discarded them.

        A worker thread of the user may still hold other groups, which a later call of the function returns.
        """
        with self.data_lock:
            self._taken = {name: taken for name, taken in self._taken.items() if taken.in_use}

    def advance(self, groups: Iterable[Group], state: GroupState) -> None:
        """Move groups to their next state."""
        for group in groups:
            self._emit(group, self.ledger.advance(sequence_of(group), state))

    def drop(self, group: Group, reason: DropReason) -> None:
        """End the group's attempt without training."""
        self._emit(group, self.ledger.drop(sequence_of(group), reason))

    def drop_filtered(self, group: Group, reason: str) -> None:
        """Drop a group that a filter or a rollout function rejected for `reason`."""
        self.events.emit(GroupFiltered(time=self.clock.time(), sequence=sequence_of(group), reason=reason))
        self.drop(group, DropReason.FILTERED)

    def _emit(self, group: Group, transition: Transition) -> None:
        counts = self.ledger.counts
        if transition.after not in LIVE:
            del self._live[transition.sequence]
        self.events.emit(
            GroupMoved(
                time=self.clock.time(),
                sequence=transition.sequence,
                feed_index=group.feed_index,
                attempt=group.attempt,
                before=transition.before,
                after=transition.after,
                reason=transition.reason,
                counts={state: counts[state] for state in LIVE},
            )
        )
        self.changed.notify()


def sequence_of(group: Group) -> int:
    """The group's sequence number. Raises LedgerError if the group was never admitted."""
    if group.sequence is None:
        raise LedgerError(f"group {group.feed_index} was never admitted; report this bug")
    return group.sequence
