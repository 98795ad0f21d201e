"""The state that the loops share: the ledger, the versions, the last sign of progress, and the event stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock

from miles_async.errors import LedgerError, UserError
from miles_async.events import EventSink, GroupFiltered, GroupMoved
from miles_async.pipeline.tasks import ChangeSignal
from miles_async.ports import Clock
from miles_async.scheduling.ledger import LIVE, GroupState, Ledger, Transition
from miles_async.types import DropReason, Group


class RunState:
    """Keeps the ledger and tells the event stream of every entry; one per run."""

    def __init__(self, clock: Clock, events: EventSink) -> None:
        self.ledger = Ledger()
        self.changed = ChangeSignal()
        """Notified at every transition and publish: all that any loop ever waits for."""
        self.clock = clock
        self.events = events
        self.trainer_version = 0
        """Weight snapshots handed to publishing, live or not."""
        self.live_version = -1
        """Newest version on every routed engine; -1 before the first publish."""
        self.last_progress = clock.now()
        """When a group was last collected, a step ended or a version went live."""
        self.lending = Lock()
        """Held while prompts change hands between the data and a rollout function, which may have its own thread."""
        self._live: dict[int, Group] = {}
        self._lent: dict[str, Group] = {}

    @property
    def live_groups(self) -> list[Group]:
        """Groups fed and neither published nor dropped yet, in the order they were fed."""
        return list(self._live.values())

    @property
    def leased(self) -> list[Group]:
        """Groups in a batch that is not trained yet."""
        return [group for group in self._live.values() if self.state(group) is GroupState.LEASED]

    @property
    def lent_groups(self) -> list[Group]:
        """What the rollout function that runs now took out of the data by itself, as it was then."""
        return list(self._lent.values())

    def lend(self, groups: Iterable[Group]) -> None:
        """To a rollout function, which may fill them in a thread of its own: copies are remembered."""
        for group in groups:
            samples = [replace(sample, metadata=dict(sample.metadata)) for sample in group]
            self._lent[group.feed_index] = Group(samples, feed_index=group.feed_index, attempt=group.attempt)

    def took_back(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._lent.pop(Group.of(group).feed_index, None)

    def state(self, group: Group) -> GroupState | None:
        return self.ledger.state(sequence_of(group))

    def progressed(self) -> None:
        self.last_progress = self.clock.now()

    def feed(self, group: Group) -> None:
        """Enter a group fresh from the data source; it gets its sequence number."""
        transition = self.ledger.feed()
        group.sequence = transition.sequence
        self._live[transition.sequence] = group
        self._tell(group, transition)

    def adopt(self, group: Group) -> None:
        """Enter a finished group that a user's rollout function made without the pipeline; it is leased at once."""
        self.feed(group)
        for state in (GroupState.IN_FLIGHT, GroupState.FINISHED, GroupState.QUEUED, GroupState.LEASED):
            self.advance([group], state)

    def take_over(self, groups: Sequence[Group], before: Sequence[Group]) -> None:
        """Account for what a rollout function returned, since when `before` were leased.

        Groups that it made itself are entered. What it took out of the data, or collected, and did not return, it did
        away with. Raises UserError for a group that it returned a second time.
        """
        returned: set[int] = set()
        for group in groups:
            if group.sequence is None:
                self.adopt(group)
            elif id(group) in returned or self.state(group) is not GroupState.LEASED:
                raise UserError(
                    f"the rollout function returned group {group.feed_index} a second time: each group trains once"
                )
            returned.add(id(group))
        kept = returned.union(map(id, before))
        for group in self.leased:
            if id(group) not in kept:
                self.filtered(group, "rollout_function")
        self._lent.clear()

    def advance(self, groups: Iterable[Group], state: GroupState) -> None:
        for group in groups:
            self._tell(group, self.ledger.advance(sequence_of(group), state))

    def drop(self, group: Group, reason: DropReason) -> None:
        self._tell(group, self.ledger.drop(sequence_of(group), reason))

    def filtered(self, group: Group, reason: str) -> None:
        """Drop a group that a user's function decided against."""
        self.events.emit(GroupFiltered(time=self.clock.now(), sequence=sequence_of(group), reason=reason))
        self.drop(group, DropReason.FILTERED)

    def _tell(self, group: Group, transition: Transition) -> None:
        counts = self.ledger.counts
        if transition.after not in LIVE:
            del self._live[transition.sequence]
        self.events.emit(
            GroupMoved(
                time=self.clock.now(),
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
    if group.sequence is None:
        raise LedgerError(f"group {group.feed_index} was never admitted")
    return group.sequence
