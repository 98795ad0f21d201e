"""The engines of a run: their state and weight version, and the time in which they had requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from miles_async.events import EngineBusy, EngineChanged, PublishEnded, Pulse

MAX_REPORTS = 1024
"""Most reports of busy seconds that are kept in memory."""


class Engines:
    """The last known state of each engine."""

    def __init__(self) -> None:
        self.known: dict[str, EngineChanged] = {}
        """The last change of each engine. The version of a routed engine is that of the last publish."""
        self.versions: dict[str, int | None] = {}
        """The last known weight version of each engine that is not lost."""

    def change(self, event: EngineChanged) -> None:
        self.known[event.engine] = event
        if event.state == "lost":
            self.versions.pop(event.engine, None)
        elif event.version is not None or event.engine not in self.versions:
            self.versions[event.engine] = event.version

    def publish(self, event: PublishEnded) -> None:
        for name in event.fenced:
            self.known[name] = EngineChanged(
                time=event.time, engine=name, state="fenced", version=None, reason="a weight write failed"
            )
        if event.live:
            for name in self.routed:
                self.known[name] = msgspec.structs.replace(self.known[name], version=event.version)
                self.versions[name] = event.version

    @property
    def routed(self) -> list[str]:
        return [name for name, engine in self.known.items() if engine.state == "routed"]


class IdleCause(StrEnum):
    """Why the engines have no requests."""

    START = "start"
    """The run starts, or another rollout worker restores it."""
    NO_ENGINE = "no_engine"
    """No engine receives requests."""
    PUBLISH = "publish"
    """Weights are being published."""
    WINDOW = "window"
    """Finished groups that the window holds back use up the slots."""
    LEARNER = "learner"
    """No slot is free, or the queue is full: generation waits for the learner."""
    REWARD = "reward"
    """Groups wait for their rewards."""
    OTHER = "other"
    """None of these, such as requests that agents have not sent yet, or the last batches of a run."""


def idle_cause(pulse: Pulse | None, routed: Sequence[str], *, publishing: bool) -> IdleCause:
    """Return why engines without requests have none. `pulse` is None until the rollout worker has reported."""
    if pulse is None:
        return IdleCause.START
    if not routed or pulse.waits_for == "no_engine":
        return IdleCause.NO_ENGINE
    if publishing:
        return IdleCause.PUBLISH
    if pulse.waits_for in ("slots", "queue"):
        return IdleCause.WINDOW if pulse.blocked else IdleCause.LEARNER
    return IdleCause.REWARD if pulse.rewarding else IdleCause.OTHER


class EngineUse:
    """The time in which the engines were busy, since the training phase began.

    Each rollout worker counts the busy seconds from 0 and reports them now and then. The values between two of its
    reports are interpolated.
    """

    def __init__(self) -> None:
        self.last: EngineBusy | None = None
        self._counted = 0.0
        """The last report of the current rollout worker."""
        self._total = 0.0
        """The busy seconds that all rollout workers have reported."""
        self._reports: deque[tuple[float, float]] = deque(maxlen=MAX_REPORTS)
        """Time and busy seconds in total of the reports that may still be needed, oldest first."""
        self._reported = 0
        self._start: float | None = None
        """When the training phase began."""
        self._busy_at_start: float | None = None
        """Known as soon as there is a report after the start."""

    def start_run(self, time: float) -> None:
        if not self._reports:
            self._add(time)

    def report(self, event: EngineBusy) -> None:
        # A counter that is smaller than before is that of another rollout worker, which began at 0.
        self._total += event.busy - self._counted if event.busy >= self._counted else event.busy
        self.last, self._counted = event, event.busy
        self._add(event.time)

    def interrupt(self) -> None:
        """Another rollout worker begins to count."""
        self._counted = 0.0

    def resume(self, time: float) -> None:
        """The engines had no request from the last report until `time`."""
        self._add(time)

    def start_step(self, time: float) -> None:
        if self._start is None:
            self._start = time

    def end_step(self, time: float) -> None:
        # All later steps end later, so they need no report before the last one up to this time.
        while self._busy_at_start is not None and len(self._reports) > 1 and self._reports[1][0] <= time:
            self._reports.popleft()

    def busy_seconds(self, until: float) -> float | None:
        """Return the busy seconds of the training phase up to `until`; None without reports."""
        if self._reported < 2 or self._start is None:
            return None
        start = self._busy_at_start if self._busy_at_start is not None else self._at(self._start)
        return self._at(until) - start

    def _add(self, time: float) -> None:
        # Events of several processes arrive slightly out of order; interpolation needs them in order.
        self._reports.append((max(time, self._reports[-1][0]) if self._reports else time, self._total))
        self._reported += 1
        if self._busy_at_start is None and self._start is not None and time >= self._start:
            self._busy_at_start = self._at(self._start)

    def _at(self, time: float) -> float:
        """Return the busy seconds at a time between two reports; those of the nearest report outside them."""
        times, busy = zip(*self._reports, strict=True)
        return float(np.interp(time, times, busy))
