"""What each data set of a run with several, and each adapter of a run that trains several, has contributed."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from miles_async.events import GroupGenerated, GroupMoved, PublishEnded, StepStarted
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

RECENT_GROUPS = 64


class Contribution:
    """The groups of one data set or adapter."""

    def __init__(self) -> None:
        self.trained = 0
        """Groups whose weights are live."""
        self.filtered = 0
        """Groups that a filter dropped."""
        self.queue = 0
        """Groups in the queue."""
        self.epochs = 0.0
        """How often the data set has been used up, with the fraction of the current epoch."""
        self.version = -1
        """The newest version of the adapter that is live; -1 before the first."""
        self.age: float | None = None
        """Mean staleness of the last batch of the adapter; None before the first."""
        self.recent: deque[float] = deque(maxlen=RECENT_GROUPS)
        """The mean rewards of the last generated groups."""

    @property
    def reward(self) -> float | None:
        """The mean reward of the last generated groups; None before the first."""
        return fmean(self.recent) if self.recent else None


class Contributions:
    """The contributions of all data sets, or of all adapters."""

    def __init__(self) -> None:
        self.known: dict[str, Contribution] = {}
        """By name, in the order of the first events; empty in a run with one data set or adapter."""

    def share(self, name: str) -> float:
        """The fraction of the trained groups that belong to a data set or adapter; 0 if none was trained."""
        return self.known[name].trained / max(1, sum(part.trained for part in self.known.values()))

    def observe(self, name: str, event: GroupMoved | GroupGenerated | StepStarted | PublishEnded) -> None:
        """Count an event of the data set or adapter with this name; the name is empty if the run has one."""
        if not name:
            return
        part = self.known.setdefault(name, Contribution())
        match event:
            case GroupMoved():
                # A publish makes a group part of the live weights, and a rollback undoes its training.
                part.trained += (event.after == GroupState.PUBLISHED) - (event.before == GroupState.PUBLISHED)
                part.queue += (event.after == GroupState.QUEUED) - (event.before == GroupState.QUEUED)
                part.filtered += event.reason == DropReason.FILTERED
            case GroupGenerated():
                part.recent.append(event.reward)
                part.epochs = max(part.epochs, event.epochs)
            case StepStarted():
                part.age = fmean(event.staleness)
            case PublishEnded() if event.live:
                part.version = max(part.version, event.version)
