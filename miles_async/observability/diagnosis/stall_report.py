"""The state of a run at a stall, for the log line after `Warning: No progress for …`."""

from __future__ import annotations

from time import time
from typing import Any

from miles_async.events import (
    ClusterReady,
    EngineBusy,
    EngineChanged,
    Event,
    GroupMoved,
    ProcessSilent,
    PublishEnded,
    PublishStarted,
    Pulse,
    Stalled,
    StepStarted,
    TrainerPhaseChanged,
)
from miles_async.scheduling.stall import StallClock


class StallReport:
    """Follows the events of a run and reports where every part of the run is when nothing makes progress.

    The rollout worker reports stalls itself. If the rollout worker hangs, `unreported_stall` reports them instead.
    """

    def __init__(self, warn_seconds: float) -> None:
        """`warn_seconds` is `--no-progress-warn-seconds`, the time without progress after which a stall is reported."""
        self._warn_seconds = warn_seconds
        self._stall = StallClock(warn_seconds)
        self._idle: tuple[float, float] | None = None
        """Seconds without progress that the rollout worker reported last, and when (`time.monotonic`)."""
        self._pulse: Pulse | None = None
        self._requests = 0
        self._counts: dict[str, int] = {}
        self._engines: dict[str, dict[str, Any]] = {}
        self._silent: dict[str, float] = {}
        self._phase = "start"
        self._publishing: int | None = None

    def observe(self, event: Event, now: float) -> None:
        """Follow an event that arrived at `now`, in seconds of the monotonic clock."""
        match event:
            case GroupMoved():
                self._counts = event.counts
            case Pulse():
                self._pulse = event
                self._idle = event.idle_seconds, now
            case EngineBusy():
                self._requests = event.in_flight
            case ClusterReady():
                self._idle = 0.0, now
            case TrainerPhaseChanged():
                self._phase = event.to
            case StepStarted():
                self._phase = "step"
            case PublishStarted():
                self._publishing = event.version
            case PublishEnded():
                self._publishing = None
                self._publish_ended(event)
            case EngineChanged():
                self._engine_changed(event)
            case ProcessSilent():
                self._silent[event.process] = event.seconds
                if not event.seconds:
                    del self._silent[event.process]
            case _:
                pass

    def unreported_stall(self, now: float) -> Stalled | None:
        """Return a stall that the rollout worker cannot report because it does not answer; None if there is none.

        `now` is in seconds of the monotonic clock.
        """
        seconds = self.idle_seconds(now)
        if "rollout" not in self._silent or not self._stall.due(seconds):
            return None
        pulse = self._pulse
        return Stalled(
            time=time(),
            seconds=seconds,
            queue=pulse.queue if pulse is not None else 0,
            collected=pulse.collected if pulse is not None else 0,
            wanted=pulse.wanted if pulse is not None else 0,
        )

    def stalled_for(self, now: float) -> float:
        """Return the seconds since the last progress, or 0 if they are fewer than `warn_seconds`."""
        seconds = self.idle_seconds(now)
        return seconds if seconds >= self._warn_seconds else 0.0

    def idle_seconds(self, now: float) -> float:
        """Return the seconds since the last progress; 0 before the run starts."""
        if self._idle is None:
            return 0.0
        seconds, reported_at = self._idle
        return seconds + now - reported_at

    def facts(self) -> dict[str, Any]:
        """Return the state of learner, rollout, window and engines as the keys of one log line."""
        facts: dict[str, Any] = {
            "trainer": self._phase,
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
                # The router does not report which engine it chose, so all routed engines are named.
                "oldest_request_engine": (" or ".join(routed) or "none is routed") if pulse.generating else "none",
                "waiting_for_reward": pulse.rewarding,
                "admission_waits_for": pulse.waits_for or "nothing",
                "admission_waits": f"{pulse.waits_seconds:.0f}s",
                "trainer_version": pulse.trainer_version,
                "live_version": pulse.live_version,
            }
        return facts

    def _publish_ended(self, event: PublishEnded) -> None:
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
