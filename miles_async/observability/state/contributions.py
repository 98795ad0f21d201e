"""What a part of a run, such as a data set or an adapter, has contributed to training."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

from miles_async.events import GroupMoved
from miles_async.scheduling.ledger import GroupState

RECENT_GROUPS = 64


class Contribution:
    """The groups of one part."""

    def __init__(self) -> None:
        self.trained = 0
        """Groups whose weights are live."""
        self.recent: deque[float] = deque(maxlen=RECENT_GROUPS)
        """The mean rewards of the last generated groups."""

    @property
    def reward(self) -> float | None:
        """The mean reward of the last generated groups; None before the first."""
        return fmean(self.recent) if self.recent else None

    def count_trained(self, event: GroupMoved) -> None:
        """Count a group that a publish has made part of the live weights, or whose training was undone."""
        self.trained += (event.after == GroupState.PUBLISHED) - (event.before == GroupState.PUBLISHED)


def share(known: Mapping[str, Contribution], name: str) -> float:
    """The fraction of the trained groups that belong to a part; 0 if none was trained."""
    return known[name].trained / max(1, sum(part.trained for part in known.values()))
