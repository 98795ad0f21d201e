"""The groups of a run: those that are live, with their history, and how many ended with which outcome."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from miles_async.events import GroupFiltered, GroupGenerated, GroupMoved
from miles_async.scheduling.ledger import GroupState

ENDED = (GroupState.PUBLISHED, GroupState.DROPPED)
RECENT_GROUPS = 512
MAX_FILTER_REASONS = 40
"""Most reasons of filters that are counted separately, because a user's filter may give any number of them."""


class Seconds(NamedTuple):
    """How long a group took."""

    generation: float
    """From the first request until the last sample ended, with the tools that it called."""
    reward: float


@dataclass(slots=True)
class Group:
    """A live group, or the group that the last event ended."""

    sequence: int
    feed_index: str
    attempt: int
    states: list[tuple[str, float]]
    """Each state that the group has entered, and when."""
    generated: GroupGenerated | None = None

    @property
    def state(self) -> str:
        return self.states[-1][0]

    @property
    def since(self) -> float:
        """When the group entered its state."""
        return self.states[-1][1]


class Groups:
    def __init__(self) -> None:
        self.live: dict[int, Group] = {}
        """Live groups by sequence number, in order of admission."""
        self.ended: Group | None = None
        """The group that ended last."""
        self.counts: Mapping[str, int] = {}
        """Number of live groups by state, as the ledger counts them. A state without groups may be missing."""
        self.fed = 0
        self.outcomes: Counter[str] = Counter()
        """Number of ended groups by outcome: `published`, or the reason for which they were dropped."""
        self.filtered: Counter[str] = Counter()
        """Number of groups that filters rejected, by the reason that the filter gave."""
        self.left_out_samples = 0
        """Samples that failed and without which their group was generated."""
        self.recent: deque[Seconds] = deque(maxlen=RECENT_GROUPS)
        """How long each of the last generated groups took."""

    def move(self, event: GroupMoved) -> None:
        self.counts = event.counts
        self.fed += event.before is None
        if event.before == GroupState.PUBLISHED:  # its training was undone
            self.outcomes[GroupState.PUBLISHED] -= 1
        if event.after in ENDED:
            self.ended = self.live.pop(event.sequence, None)
            self.outcomes[event.reason or event.after] += 1
        elif (group := self.live.get(event.sequence)) is not None:
            group.states.append((event.after, event.time))
        else:
            states = [(event.after, event.time)]
            self.live[event.sequence] = Group(event.sequence, event.feed_index, event.attempt, states)

    def generate(self, event: GroupGenerated) -> None:
        self.left_out_samples += event.missing
        self.recent.append(Seconds(event.generation_seconds, event.reward_seconds))
        if (group := self.live.get(event.sequence)) is not None:
            group.generated = event

    def filter(self, event: GroupFiltered) -> None:
        known = event.reason in self.filtered or len(self.filtered) < MAX_FILTER_REASONS
        self.filtered[event.reason if known else "other"] += 1

    def forget(self) -> None:
        """Forget the live groups, because events are missing: some of these groups may have ended."""
        self.live.clear()

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped groups by reason."""
        return {outcome: count for outcome, count in self.outcomes.items() if outcome not in ENDED}
