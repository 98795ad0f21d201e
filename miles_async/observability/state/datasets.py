"""What each data set of a run with several data sets has contributed."""

from __future__ import annotations

from miles_async.events import GroupGenerated, GroupMoved
from miles_async.observability.state.contributions import Contribution, share
from miles_async.types import DropReason


class DatasetState(Contribution):
    """The groups of one data set."""

    def __init__(self) -> None:
        super().__init__()
        self.filtered = 0
        self.epochs = 0.0
        """How often the data set has been used up, with the fraction of the current epoch."""


class Datasets:
    def __init__(self) -> None:
        self.known: dict[str, DatasetState] = {}
        """By name, in the order of their first groups; empty in a run with one data set."""

    def move(self, event: GroupMoved) -> None:
        if not event.dataset:
            return
        dataset = self.known.setdefault(event.dataset, DatasetState())
        dataset.count_trained(event)
        dataset.filtered += event.reason == DropReason.FILTERED

    def generate(self, event: GroupGenerated) -> None:
        if event.dataset:
            dataset = self.known.setdefault(event.dataset, DatasetState())
            dataset.recent.append(event.reward)
            dataset.epochs = max(dataset.epochs, event.epochs)

    def share(self, name: str) -> float:
        """The fraction of the trained groups that are from a data set; 0 if none was trained."""
        return share(self.known, name)
