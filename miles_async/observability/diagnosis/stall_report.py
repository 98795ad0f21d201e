"""What stands still, from the events alone: the report after the line `Warning: No progress for …`.

The rollout worker tells of a stall itself. Where it is the one that hangs, `overdue` tells of it in its place.
"""

from __future__ import annotations

from typing import Any

from miles_async.events import (
    ClusterReady,
    EngineBusy,
    EngineChanged,
    Evaluated,
    Event,
    GroupMoved,
    ProcessSilent,
    PublishEnded,
    PublishStarted,
    Pulse,
    Stalled,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
)
from miles_async.scheduling.stall import StallClock


class StallReport:
    def __init__(self, warn_seconds: float) -> None:
        self._warn_seconds = warn_seconds
        self._clock = StallClock(warn_seconds)
        self._progress: float | None = None
        self._pulse: Pulse | None = None
        self._requests = 0
        self._counts: dict[str, int] = {}
        self._engines: dict[str, dict[str, Any]] = {}
        self._silent: dict[str, float] = {}
        self._doing = "start"
        self._publishing: int | None = None

    def observe(self, event: Event) -> None:
        match event:
            case GroupMoved():
                self._counts = event.counts
                if event.after == "queued":
                    self._progress = event.time
            case Pulse():
                self._pulse = event
            case EngineBusy():
                self._requests = event.in_flight
            case ClusterReady() | Evaluated():
                self._progress = event.time
            case TrainerPhaseChanged():
                self._doing = event.to
            case StepStarted():
                self._doing = "step"
            case StepEnded():
                self._progress = event.time
            case PublishStarted():
                self._publishing = event.version
            case PublishEnded():
                self._publishing = None
                self._progress = event.time
                self._published(event)
            case EngineChanged():
                self._engine_changed(event)
            case ProcessSilent():
                self._silent[event.process] = event.seconds
                if not event.seconds:
                    del self._silent[event.process]
            case _:
                pass

    def unreported_stall(self, now: float) -> Stalled | None:
        """A stall that the rollout worker cannot tell of, because it hangs itself."""
        still = now - self._progress if self._progress is not None else 0.0
        if "rollout" not in self._silent or not self._clock.due(still):
            return None
        pulse = self._pulse
        return Stalled(
            time=now,
            seconds=still,
            queue=pulse.queue if pulse is not None else 0,
            collected=pulse.collected if pulse is not None else 0,
            wanted=pulse.wanted if pulse is not None else 0,
        )

    def stalled_for(self, now: float) -> float:
        """Seconds since the last progress, where that is long enough for a warning; else 0."""
        still = now - self._progress if self._progress is not None else 0.0
        return still if still >= self._warn_seconds else 0.0

    def facts(self) -> dict[str, Any]:
        """Where everything stands, for one log line."""
        facts: dict[str, Any] = {
            "trainer": self._doing,
            "publishing_version": self._publishing,
            "groups": {str(state): count for state, count in self._counts.items() if count},
            "requests_in_flight": self._requests,
            "silent": {process: f"{seconds:.0f}s" for process, seconds in self._silent.items()} or "none",
            "engines": self._engines,
        }
        if (pulse := self._pulse) is not None:
            routed = [name for name, engine in self._engines.items() if engine["state"] == "routed"]
            facts |= {
                "head": pulse.head,
                "head_state": pulse.head_state or "not admitted",
                "head_age": f"{pulse.head_seconds:.0f}s",
                "held_back_by_window": pulse.blocked,
                "oldest_request": f"group {pulse.oldest}, {pulse.oldest_seconds:.0f}s" if pulse.generating else "none",
                # The router picks the engine and does not say which; with one there is no doubt.
                "oldest_request_engine": (" or ".join(routed) or "none is routed") if pulse.generating else "none",
                "waiting_for_reward": pulse.rewarding,
                "admission_waits_for": pulse.waits_for or "nothing",
                "admission_waits": f"{pulse.waits_seconds:.0f}s",
                "trainer_version": pulse.trainer_version,
                "live_version": pulse.live_version,
            }
        return facts

    def _published(self, event: PublishEnded) -> None:
        for name, engine in self._engines.items():
            if event.live and engine["state"] == "routed" and name not in event.fenced:
                engine["version"] = event.version

    def _engine_changed(self, event: EngineChanged) -> None:
        if event.state == "lost":
            self._engines.pop(event.engine, None)
            return
        known = self._engines.get(event.engine, {"version": None})
        version = event.version if event.version is not None else known["version"]
        self._engines[event.engine] = {"state": event.state, "version": version}
