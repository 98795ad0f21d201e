"""The current status of a run, computed from the event stream for the live page and the report."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_async.events import (
    ClusterReady,
    CollapseRiskChanged,
    EngineBusy,
    EngineChanged,
    Evaluated,
    Event,
    EventsMissing,
    GroupFiltered,
    GroupMoved,
    ProcessSilent,
    PublishEnded,
    PublishStarted,
    Pulse,
    QueueChanged,
    RouterChanged,
    RunEnded,
    RunStarted,
    Stalled,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
    VerdictChanged,
    WarningRaised,
    WriteFailed,
)
from miles_async.scheduling.ledger import GroupState
from miles_async.visible_text import visible_text

MAX_NOTICES = 8
MAX_OUTCOMES = 40
"""Most outcomes that are counted separately, because a user's filter may give any number of different reasons."""
SLOTS_SHOWN = 480
"""Most live groups that are listed; further groups are only counted."""
ENDED = (GroupState.PUBLISHED, GroupState.DROPPED)


@dataclass(slots=True)
class _Slot:
    sequence: int
    feed_index: str
    attempt: int
    state: str
    since: float


class RunStatus:
    """Pass every event to `observe`; `figures` returns the status at a given time."""

    def __init__(self) -> None:
        self._now = 0.0
        self.run: RunStarted | None = None
        self._cluster: ClusterReady | None = None
        self._ended: RunEnded | None = None
        self._slots: dict[int, _Slot] = {}
        """Live groups, in order of admission."""
        self._fed = 0
        self._outcomes: Counter[str] = Counter()
        """Number of groups that ended, by outcome: published, or the reason for which they were dropped."""
        self._staleness: Counter[int] = Counter()
        self._queue: QueueChanged | None = None
        self._pulse: Pulse | None = None
        self._busy: EngineBusy | None = None
        self._phase: TrainerPhaseChanged | None = None
        self._verdict: VerdictChanged | None = None
        self._collapse: CollapseRiskChanged | None = None
        self._step_started: StepStarted | None = None
        self._step: StepEnded | None = None
        self._publish_started: PublishStarted | None = None
        self._publish: PublishEnded | None = None
        self._engines: dict[str, EngineChanged] = {}
        self._router: RouterChanged | None = None
        self._silent: dict[str, float] = {}
        """Processes that do not answer, and for how many seconds."""
        self._scores: dict[str, list[Evaluated]] = {}
        """First and last evaluation, by data set."""
        self._notices: deque[WarningRaised] = deque(maxlen=MAX_NOTICES)

    def observe(self, event: Event) -> None:
        self._now = max(self._now, event.time)
        match event:
            case GroupMoved():
                self._moved(event)
            case QueueChanged():
                self._queue = event
            case Pulse():
                self._pulse = event
            case EngineBusy():
                self._busy = event
            case RunStarted():
                # A driver that continues the run emits it again.
                self.run, self._ended = self.run or event, None
            case ClusterReady():
                self._cluster = event
            case TrainerPhaseChanged():
                self._phase = event
            case VerdictChanged():
                self._verdict = event
            case CollapseRiskChanged():
                self._collapse = event
                sign = "the policy may collapse soon" if event.high else "the signs of a collapse are gone"
                text = f"after rollout {event.rollout}, {sign}: {event.why}"
                self._notices.append(WarningRaised(time=event.time, text=text))
            case StepStarted():
                self._step_started = event
            case StepEnded():
                self._step_ended(event)
            case PublishStarted():
                self._publish_started = event
            case PublishEnded():
                self._publish_ended(event)
            case EngineChanged():
                self._engines[event.engine] = event
            case RouterChanged():
                self._router = event
            case ProcessSilent():
                self._process_silent(event)
            case Evaluated():
                self._scores[event.name] = [*self._scores.get(event.name, [])[:1], event]
            case GroupFiltered():
                known = f"filtered: {event.reason}" in self._outcomes or len(self._outcomes) < MAX_OUTCOMES
                self._outcomes[f"filtered: {event.reason if known else 'other'}"] += 1
            case WarningRaised():
                self._notices.append(event)
            case WriteFailed():
                text = f"writing version {event.version} to {event.engine} failed ({event.error}): {event.then}"
                self._notices.append(WarningRaised(time=event.time, text=text))
            case Stalled():
                self._notices.append(WarningRaised(time=event.time, text=f"no progress for {event.seconds:.0f} s"))
            case EventsMissing():
                self._slots.clear()  # groups that ended in the deleted parts would otherwise stay for ever
                text = "events are missing from here on: parts of the event log were deleted (--event-log-max-bytes)"
                self._notices.append(WarningRaised(time=event.time, text=text))
            case RunEnded():
                self._ended = event
            case _:
                pass

    def _moved(self, event: GroupMoved) -> None:
        if event.before is None:
            self._fed += 1
            self._slots[event.sequence] = _Slot(
                event.sequence, event.feed_index, event.attempt, event.after, event.time
            )
        elif event.after in ENDED:
            self._slots.pop(event.sequence, None)
            self._outcomes[event.reason or event.after] += 1
        elif (slot := self._slots.get(event.sequence)) is not None:
            slot.state, slot.since = event.after, event.time

    def _step_ended(self, event: StepEnded) -> None:
        self._step = event
        if event.finite and self._step_started is not None:
            self._staleness.update(self._step_started.staleness)

    def _publish_ended(self, event: PublishEnded) -> None:
        self._publish, self._publish_started = event, None
        for name in event.fenced:
            self._engines[name] = EngineChanged(
                time=event.time, engine=name, state="fenced", version=None, reason="a weight write failed"
            )
        if event.live:
            for name, engine in self._engines.items():
                if engine.state == "routed":
                    self._engines[name] = msgspec.structs.replace(engine, version=event.version)

    def _process_silent(self, event: ProcessSilent) -> None:
        if event.seconds:
            self._silent[event.process] = event.seconds
        else:
            self._silent.pop(event.process, None)

    def figures(self, now: float) -> dict[str, Any]:
        """Return the status as plain values for JSON.

        Times are in seconds since the run began. Ages are in seconds until `now` or until the end of the run.
        """
        began = self.run.time if self.run is not None else now
        now = self.until(now)
        return {
            "run": self.run,
            "cluster": self._cluster,
            "ended": self._ended.reason if self._ended is not None else None,
            "began": began,
            "elapsed": now - began,
            "training_began": self._cluster.time - began if self._cluster is not None else None,
            "verdict": self._verdict,
            "collapse": self._collapse if self._collapse is not None and self._collapse.high else None,
            "trainer": self._phase and {"does": self._phase.to, "for": max(0.0, now - self._phase.time)},
            "rollouts_done": self._step.rollout + 1 if self._step is not None else 0,
            "fed": self._fed,
            "requests": self._busy.in_flight if self._busy is not None else 0,
            "queue": {"depth": self._queue.depth, "blocked": self._queue.blocked} if self._queue is not None else None,
            "staleness_limit": self.run.staleness_limit if self.run is not None else None,
            "pulse": self._pulse,
            "pulse_age": max(0.0, now - self._pulse.time) if self._pulse is not None else None,
            "outcomes": dict(self._outcomes.most_common()),
            "staleness": {str(age): self._staleness[age] for age in sorted(self._staleness)},
            "step": self._step,
            "publish": self._publish,
            "publishing": self._publish_started and self._publish_started.version,
            "router": self._router,
            "engines": [self._engines[name] for name in sorted(self._engines)],
            "silent": dict(self._silent),
            "scores": {name: [_score(event) for event in events] for name, events in self._scores.items()},
            "slots": self._window(now),
            "notices": [
                *({"at": notice.time - began, "text": visible_text(notice.text)} for notice in reversed(self._notices)),
                *self._untested(),
            ],
        }

    def _untested(self) -> list[dict[str, Any]]:
        """The oldest notice: arguments that were never tried."""
        if self.run is None or not self.run.untested:
            return []
        return [{"at": 0.0, "text": f"SGLang's arguments {' '.join(self.run.untested)} were never tried"}]

    def until(self, now: float) -> float:
        """Return `now`, or the time at which the run ended if it has ended."""
        return self._ended.time if self._ended is not None else now

    def _window(self, now: float) -> dict[str, Any]:
        """Return the head of the window, the live groups by state, and the oldest SLOTS_SHOWN live groups."""
        waiting = (GroupState.FED, GroupState.IN_FLIGHT, GroupState.FINISHED)
        return {
            "head": next((s.sequence for s in self._slots.values() if s.state in waiting), None),
            "counts": Counter(slot.state for slot in self._slots.values()),
            "live": [
                [slot.sequence, slot.state, round(max(0.0, now - slot.since), 1), slot.attempt, slot.feed_index]
                for slot, _ in zip(self._slots.values(), range(SLOTS_SHOWN), strict=False)
            ],
        }


def _score(event: Evaluated) -> dict[str, Any]:
    return {**msgspec.structs.asdict(event), "interval": event.interval}
