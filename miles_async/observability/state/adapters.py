"""What each adapter of a run that trains several has got so far."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from miles_async.events import GroupGenerated, GroupMoved, LearnerRestored, PublishEnded, StepStarted
from miles_async.scheduling.ledger import GroupState

RECENT_GROUPS = 64


class AdapterState:
    """The groups and versions of one adapter."""

    def __init__(self) -> None:
        self.version = -1
        """Its newest version that is live; -1 before the first."""
        self.trained = 0
        """Groups whose weights are live."""
        self.queue = 0
        """Groups in its queue."""
        self.age: float | None = None
        """Mean staleness of its last batch; None before the first."""
        self.recent: deque[float] = deque(maxlen=RECENT_GROUPS)
        """The mean rewards of its last generated groups."""

    @property
    def reward(self) -> float | None:
        """The mean reward of the last generated groups; None before the first."""
        return fmean(self.recent) if self.recent else None


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
                adapter.trained += event.after == GroupState.PUBLISHED
                adapter.trained -= event.before == GroupState.PUBLISHED  # its training was undone
                adapter.queue += (event.after == GroupState.QUEUED) - (event.before == GroupState.QUEUED)
            case GroupGenerated():
                adapter.recent.append(event.reward)
            case StepStarted():
                adapter.age = fmean(event.staleness)
            case PublishEnded() if event.live:
                adapter.version = max(adapter.version, event.version)

    def share(self, name: str) -> float:
        """The fraction of the trained groups that have trained an adapter; 0 if none was trained."""
        return self.known[name].trained / max(1, sum(adapter.trained for adapter in self.known.values()))
