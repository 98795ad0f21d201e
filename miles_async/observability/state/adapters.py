"""What each adapter of a run that trains several has got so far."""

from __future__ import annotations

from statistics import fmean

from miles_async.events import GroupGenerated, GroupMoved, LearnerRestored, PublishEnded, StepStarted
from miles_async.observability.state.contributions import Contribution, share
from miles_async.scheduling.ledger import GroupState


class AdapterState(Contribution):
    """The groups and versions of one adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.version = -1
        """Its newest version that is live; -1 before the first."""
        self.queue = 0
        """Groups in its queue."""
        self.age: float | None = None
        """Mean staleness of its last batch; None before the first."""


class Adapters:
    def __init__(self) -> None:
        self.known: dict[str, AdapterState] = {}
        """By name, in the order of their first versions; empty unless the run trains several."""

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

    def share(self, name: str) -> float:
        """The fraction of the trained groups that have trained an adapter; 0 if none was trained."""
        return share(self.known, name)
