"""The series that the live page and the report plot, computed from the event stream.

There are two sets of series: one for the whole run and one for its last minutes. A name with a colon belongs to a
family, such as `trainer:step`, `verdict:rollout-bound`, `eval:held_out` or `step:grad_norm`. The confidence interval of
`eval:held_out` is from `eval-low:held_out` to `eval-high:held_out`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

from miles_async import events
from miles_async.observability.state.groups import Groups
from miles_async.observability.state.learner import Step
from miles_async.observability.state.timeline import Timeline
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason

Span = Literal["recent", "whole"]

WHOLE_RUN_BUCKETS = 600
"""As many buckets as a wide screen can show."""
RECENT_SECONDS, RECENT_BUCKETS = 300.0, 300
COUNT_SECONDS = 0.1
"""Shortest time between two samples of the group counts, because groups change state thousands of times a second."""
INTERRUPTED = "interrupted"
"""The phase of the learner, and the verdict, while no rollout worker serves the run."""
MAX_BATCHES = 256
"""Most batches whose rewards are listed one by one. In a longer run, each value is the mean over several batches."""
MAX_NAMES = 24
"""Most series per family whose members are named by users or libraries (learner metrics and evaluated data sets)."""


class Charts:
    """Pass every event to `observe`; `figures` returns the series up to a given time."""

    def __init__(self, groups: Groups, *, recent: bool) -> None:
        """`groups` are those of the run. `recent` selects whether the last minutes are also kept at a finer
        resolution."""
        self._groups = groups
        self._recent = recent
        self._timelines: dict[Span, Timeline] = {}
        self._samples_per_group = 1
        self._counted_at = 0.0
        self._busy: events.EngineBusy | None = None
        """The last report of the current rollout worker."""
        self._batch = 0
        """Number of groups in the training step that runs now."""
        self._batches = Timeline(0.0, width=1.0, max_buckets=MAX_BATCHES)
        """The reward of each batch. Times are rollout ids."""
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        """The series that are kept, by family; see `MAX_NAMES`."""

    def observe(self, event: events.Event) -> None:
        match event:
            case events.RunStarted() if "whole" not in self._timelines:
                self._samples_per_group = event.samples_per_group
                self._timelines["whole"] = Timeline(event.time, width=0.5, max_buckets=WHOLE_RUN_BUCKETS)
                if self._recent:
                    width = RECENT_SECONDS / RECENT_BUCKETS
                    self._timelines["recent"] = Timeline(
                        event.time, width=width, max_buckets=RECENT_BUCKETS, rolling=True
                    )
            case events.GroupMoved():
                self._moved(event)
            case events.QueueChanged():
                self._set_value("queue", event.time, event.depth)
                self._set_value("blocked", event.time, event.blocked)
            case events.GroupGenerated():
                self._count("generated", event.time, 1)
                self._count("response_tokens", event.time, event.response_tokens)
                self._observe("truncated", event.time, event.truncated / (self._samples_per_group - event.missing))
                self._observe("generation_seconds", event.time, event.generation_seconds)
            case events.Pulse():
                self._set_value("head_seconds", event.time, event.head_seconds)
                self._set_value("version_lag", event.time, event.trainer_version - event.live_version)
            case events.EngineBusy():
                self._engines_busy(event)
            case events.AdmissionBlocked():
                self._add_interval(f"blocked:{event.cause}", event.time - event.seconds, event.time)
            case events.StepStarted():
                self._batch = len(event.staleness)
                for age in event.staleness:
                    self._observe("staleness", event.time, age)
            case events.StepEnded():
                self._step_ended(event)
            case events.PublishEnded():
                self._observe("pause_ms", event.time, 1e3 * event.paused_seconds)
                self._observe("stage_ms", event.time, 1e3 * event.staged_seconds)
            case events.Evaluated():
                self._observe_evaluation(event)
            case events.LoopLag():
                self._observe("loop_lag_ms", event.time, 1e3 * event.seconds)

    def account(self, phase: str, verdict: str, start: float, end: float) -> None:
        """Assign the time from `start` to `end` to what the learner did in it, and to the verdict on it."""
        self._add_interval(f"trainer:{phase}", start, end)
        self._add_interval(f"verdict:{verdict}", start, end)

    def interrupt(self, start: float, end: float) -> None:
        """No rollout worker served the run from `start` to `end`."""
        self.account(INTERRUPTED, INTERRUPTED, start, end)
        self._busy = None

    def undo(self, step: Step) -> None:
        """Take back the reward of a batch whose training was lost."""
        self._batches.retract("reward", step.rollout, step.reward)

    def figures(self, span: Span, now: float) -> dict[str, Any]:
        """Return the series of a span; there are none before the run starts."""
        if not self._timelines:
            return {"start": 0.0, "width": 1.0, "series": {}}
        self._advance(now)
        return self._timelines[span].figures()

    def rewards(self) -> dict[str, Any]:
        """Return the reward of each batch, as `Timeline.figures` does: times are rollout ids."""
        return self._batches.figures()

    def verdicts(self, now: float) -> list[tuple[float, float, str]]:
        """Return the dominant verdict over time as (start, end, verdict), in seconds since the run began."""
        if not self._timelines:
            return []
        self._advance(now)
        return self._timelines["whole"].dominant_phases("verdict:")

    def _advance(self, now: float) -> None:
        self._set_counts(now)
        for timeline in self._timelines.values():
            timeline.advance(now)

    def _moved(self, event: events.GroupMoved) -> None:
        if abs(event.time - self._counted_at) >= COUNT_SECONDS:
            self._counted_at = event.time
            self._set_counts(event.time)
        if event.after == GroupState.DROPPED:
            stale = event.reason == DropReason.STALE
            self._count("recycled" if stale else "dropped", event.time, 1)

    def _set_counts(self, time: float) -> None:
        self._set_value("generating", time, self._groups.counts.get(GroupState.IN_FLIGHT, 0))
        self._set_value("slots", time, sum(self._groups.counts.values()))

    def _engines_busy(self, event: events.EngineBusy) -> None:
        self._set_value("requests", event.time, event.in_flight)
        before, self._busy = self._busy, event
        if before is not None and event.time > before.time and event.busy >= before.busy:
            fraction = (event.busy - before.busy) / (event.time - before.time)
            self._add_interval("engines_busy", before.time, event.time, min(1.0, fraction))

    def _step_ended(self, event: events.StepEnded) -> None:
        self._observe("reward", event.time, event.reward)
        self._batches.observe("reward", event.rollout, event.reward)
        self._observe("response_length", event.time, event.response_length)
        self._observe("step_seconds", event.time, event.seconds)
        self._count("trained", event.time, self._batch if event.finite else 0)
        self._count("trained_tokens", event.time, event.tokens)
        for name, value in event.metrics.items():
            self._observe_named("step", name, event.time, value)

    def _observe_evaluation(self, event: events.Evaluated) -> None:
        low, high = event.interval
        for family, value in (("eval", event.accuracy), ("eval-low", low), ("eval-high", high)):
            self._observe_named(family, event.name, event.time, value)

    def _observe_named(self, family: str, name: str, time: float, value: float) -> None:
        names = self._names[family]
        if name in names or len(names) < MAX_NAMES:
            names.add(name)
            self._observe(f"{family}:{name}", time, value)

    def _observe(self, name: str, time: float, value: float) -> None:
        for timeline in self._timelines.values():
            timeline.observe(name, time, value)

    def _count(self, name: str, time: float, amount: float) -> None:
        for timeline in self._timelines.values():
            timeline.count(name, time, amount)

    def _set_value(self, name: str, time: float, value: float) -> None:
        for timeline in self._timelines.values():
            timeline.set_value(name, time, value)

    def _add_interval(self, name: str, start: float, end: float, fraction: float = 1.0) -> None:
        for timeline in self._timelines.values():
            timeline.add_interval(name, start, end, fraction)
