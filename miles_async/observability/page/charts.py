"""What page and report plot: the event stream folded into series over time, of the whole run and of its last minutes.

Names with a colon are families: `trainer:step`, `verdict:rollout-bound`, `eval:held_out`, `step:grad_norm`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_async.events import (
    AdmissionBlocked,
    EngineBusy,
    Evaluated,
    Event,
    GroupGenerated,
    GroupMoved,
    LoopLag,
    PublishEnded,
    Pulse,
    QueueChanged,
    RunStarted,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
    VerdictChanged,
)
from miles_async.observability.page.timeline import Timeline
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

PLACES = 600
"""Buckets of the whole run: as many as a wide screen shows."""
RECENT_SECONDS, RECENT_PLACES = 300.0, 300
COUNT_SECONDS = 0.1
"""Groups are counted at most so often: they move thousands of times a second."""
NAMES_KEPT = 24
"""Of the learner's own figures, and of the data sets evaluated: as many as can be looked at."""


@dataclass(slots=True)
class _Since:
    what: str
    time: float


class Charts:
    """Feed every event to `observe`; `figures` reads the series off as they stand at `now`."""

    def __init__(self, *, recent: bool = True) -> None:
        """`recent`: whether the last minutes are kept apart too."""
        self._recent = recent
        self._timelines: dict[str, Timeline] = {}
        self._samples_per_group = 1
        self._counts: Mapping[str, int] = {}
        """Live groups by state, as last told."""
        self._counted_at = 0.0
        self._busy: EngineBusy | None = None
        self._batch = 0
        """Groups whose step runs now."""
        self._stretches: dict[str, _Since] = {}
        """What the trainer does, and the verdict."""
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        """Those kept of each family that users may name members of."""

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._samples_per_group = event.samples_per_group
                self._timelines["whole"] = Timeline(event.time, width=0.5, max_buckets=PLACES)
                if self._recent:
                    width = RECENT_SECONDS / RECENT_PLACES
                    self._timelines["recent"] = Timeline(
                        event.time, width=width, max_buckets=RECENT_PLACES, rolling=True
                    )
            case GroupMoved():
                self._moved(event)
            case QueueChanged():
                self._hold("queue", event.time, event.depth)
                self._hold("blocked", event.time, event.blocked)
            case GroupGenerated():
                self._count("generated", event.time, 1)
                self._count("response_tokens", event.time, event.response_tokens)
                self._note("truncated", event.time, event.truncated / self._samples_per_group)
                self._note("generation_seconds", event.time, event.generated - event.started)
            case Pulse():
                self._hold("head_seconds", event.time, event.head_seconds)
                self._hold("version_lag", event.time, event.trainer_version - event.live_version)
            case EngineBusy():
                self._engines_busy(event)
            case AdmissionBlocked():
                self._spread(f"blocked:{event.cause}", event.time - event.seconds, event.time)
            case StepStarted():
                self._batch = len(event.staleness)
                for age in event.staleness:
                    self._note("staleness", event.time, age)
            case StepEnded():
                self._step_ended(event)
            case PublishEnded():
                self._note("pause_ms", event.time, 1e3 * event.paused_seconds)
                self._note("stage_ms", event.time, 1e3 * event.staged_seconds)
            case Evaluated():
                self._note_named("eval", event.name, event.time, event.accuracy)
            case TrainerPhaseChanged():
                self._turned("trainer", event.to, event.time)
            case VerdictChanged():
                self._turned("verdict", event.verdict, event.time)
            case LoopLag():
                self._note("loop_lag_ms", event.time, 1e3 * event.seconds)
            case _:
                pass

    def figures(self, span: str, now: float) -> dict[str, Any]:
        """The series of `whole` or `recent`; empty before the run started."""
        if not self._timelines:
            return {"start": 0.0, "width": 1.0, "series": {}}
        self._settle(now)
        return self._timelines[span].figures()

    def verdicts(self, now: float) -> list[tuple[float, float, str]]:
        """The verdict that held for most of the time, by phase: (start, end, verdict), seconds since the run began."""
        if not self._timelines:
            return []
        self._settle(now)
        return self._timelines["whole"].dominant_phases("verdict:")

    def _settle(self, now: float) -> None:
        for family, stretch in self._stretches.items():
            self._spread(f"{family}:{stretch.what}", stretch.time, now)
            stretch.time = max(stretch.time, now)
        self._hold_counts(now)
        for timeline in self._timelines.values():
            timeline.advance(now)

    def _turned(self, family: str, what: str, time: float) -> None:
        before = self._stretches.get(family)
        if before is not None:
            self._spread(f"{family}:{before.what}", before.time, time)
        self._stretches[family] = _Since(what, time)

    def _moved(self, event: GroupMoved) -> None:
        self._counts = event.counts
        if event.time >= self._counted_at + COUNT_SECONDS:
            self._counted_at = event.time
            self._hold_counts(event.time)
        if event.after == GroupState.DROPPED:
            stale = event.reason == DropReason.STALE
            self._count("recycled" if stale else "dropped", event.time, 1)

    def _hold_counts(self, time: float) -> None:
        self._hold("generating", time, self._counts.get(GroupState.IN_FLIGHT, 0))
        self._hold("slots", time, sum(self._counts.values()))

    def _engines_busy(self, event: EngineBusy) -> None:
        self._hold("requests", event.time, event.in_flight)
        before, self._busy = self._busy, event
        if before is not None and event.time > before.time:
            share = (event.busy - before.busy) / (event.time - before.time)
            self._spread("engines_busy", before.time, event.time, min(1.0, share))

    def _step_ended(self, event: StepEnded) -> None:
        self._note("reward", event.time, event.reward)
        self._note("response_length", event.time, event.response_length)
        self._note("step_seconds", event.time, event.ended - event.started)
        self._count("trained", event.time, self._batch if event.finite else 0)
        self._count("trained_tokens", event.time, event.tokens)
        for name, value in event.metrics.items():
            self._note_named("step", name, event.time, value)

    def _note_named(self, family: str, name: str, time: float, value: float) -> None:
        names = self._names[family]
        if name in names or len(names) < NAMES_KEPT:
            names.add(name)
            self._note(f"{family}:{name}", time, value)

    def _note(self, name: str, time: float, value: float) -> None:
        for timeline in self._timelines.values():
            timeline.observe(name, time, value)

    def _count(self, name: str, time: float, amount: float) -> None:
        for timeline in self._timelines.values():
            timeline.count(name, time, amount)

    def _hold(self, name: str, time: float, value: float) -> None:
        for timeline in self._timelines.values():
            timeline.set_value(name, time, value)

    def _spread(self, name: str, start: float, end: float, share: float = 1.0) -> None:
        for timeline in self._timelines.values():
            timeline.add_interval(name, start, end, share)
