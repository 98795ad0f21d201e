"""What each data set of a run with several data sets has contributed."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from miles_async.events import GroupGenerated, GroupMoved
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

RECENT_GROUPS = 64


class DatasetState:
    """The groups of one data set."""

    def __init__(self) -> None:
        self.trained = 0
        self.filtered = 0
        self.epochs = 0.0
        """How often the data set has been used up, with the fraction of the current epoch."""
        self.recent: deque[float] = deque(maxlen=RECENT_GROUPS)
        """The mean rewards of the last generated groups."""

    @property
    def reward(self) -> float | None:
        """The mean reward of the last generated groups; None before the first."""
        return fmean(self.recent) if self.recent else None


class Datasets:
    def __init__(self) -> None:
        self.known: dict[str, DatasetState] = {}
        """By name, in the order of their first groups; empty in a run with one data set."""

    def move(self, event: GroupMoved) -> None:
        if not event.dataset:
            return
        dataset = self.known.setdefault(event.dataset, DatasetState())
        dataset.trained += event.after == GroupState.PUBLISHED
        dataset.trained -= event.before == GroupState.PUBLISHED  # its training was undone
        dataset.filtered += event.reason == DropReason.FILTERED

    def generate(self, event: GroupGenerated) -> None:
        if event.dataset:
            dataset = self.known.setdefault(event.dataset, DatasetState())
            dataset.recent.append(event.reward)
            dataset.epochs = max(dataset.epochs, event.epochs)

    def share(self, name: str) -> float:
        """The fraction of the trained groups that are from a data set; 0 if none was trained."""
        return self.known[name].trained / max(1, sum(dataset.trained for dataset in self.known.values()))
