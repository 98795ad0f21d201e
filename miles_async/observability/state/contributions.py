"""What each data set of a run with several, and each adapter of a run that trains several, has contributed."""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import Generic, TypeVar

from miles_async.events import GroupGenerated, GroupMoved, LearnerRestored, PublishEnded, StepStarted
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

RECENT_GROUPS = 64


class Contribution:
    """The groups of one data set or adapter."""

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


class DatasetState(Contribution):
    def __init__(self) -> None:
        super().__init__()
        self.filtered = 0
        self.epochs = 0.0
        """How often the data set has been used up, with the fraction of the current epoch."""


class AdapterState(Contribution):
    def __init__(self) -> None:
        super().__init__()
        self.version = -1
        """Its newest version that is live; -1 before the first."""
        self.queue = 0
        """Groups in its queue."""
        self.age: float | None = None
        """Mean staleness of its last batch; None before the first."""


C = TypeVar("C", bound=Contribution)


class Contributions(Generic[C]):
    def __init__(self) -> None:
        self.known: dict[str, C] = {}
        """By name, in the order of the first events; empty in a run with one data set or adapter."""

    def share(self, name: str) -> float:
        """The fraction of the trained groups that belong to a data set or adapter; 0 if none was trained."""
        return self.known[name].trained / max(1, sum(part.trained for part in self.known.values()))


class Datasets(Contributions[DatasetState]):
    def observe(self, event: GroupMoved | GroupGenerated) -> None:
        if not event.dataset:
            return
        dataset = self.known.setdefault(event.dataset, DatasetState())
        match event:
            case GroupMoved():
                dataset.count_trained(event)
                dataset.filtered += event.reason == DropReason.FILTERED
            case GroupGenerated():
                dataset.recent.append(event.reward)
                dataset.epochs = max(dataset.epochs, event.epochs)


class Adapters(Contributions[AdapterState]):
    def observe(self, event: GroupMoved | GroupGenerated | StepStarted | PublishEnded | LearnerRestored) -> None:
        if not event.adapter:
            return
        adapter = self.known.setdefault(event.adapter, AdapterState())
        match event:
            case GroupMoved():
                adapter.count_trained(event)
                adapter.queue += (event.after == GroupState.QUEUED) - (event.before == GroupState.QUEUED)
            case GroupGenerated():
                adapter.recent.append(event.reward)
            case StepStarted():
                adapter.age = fmean(event.staleness)
            case PublishEnded() if event.live:
                adapter.version = max(adapter.version, event.version)
