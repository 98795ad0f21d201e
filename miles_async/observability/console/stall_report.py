"""The state of a run at a stall, for the log line after `Warning: No progress for …`."""

from __future__ import annotations

from time import time
from typing import Any

from miles_async.events import ClusterReady, Event, Pulse, Stalled
from miles_async.observability.view import RunView
from miles_async.scheduling.stall import StallClock


class StallReport:
    """Tells for how long a run has made no progress, and where every part of the run is then.

    The rollout worker reports stalls itself. If the rollout worker hangs, `unreported_stall` reports them instead.
    """

    def __init__(self, view: RunView, warn_seconds: float) -> None:
        """`warn_seconds` is `--no-progress-warn-seconds`, the shortest time without progress that is reported."""
        self._view = view
        self._warn_seconds = warn_seconds
        self._stall = StallClock()
        self._idle: tuple[float, float] | None = None
        """Seconds without progress that the rollout worker reported last, and when the report arrived
        (`time.monotonic`): the time stamp of the report comes from the wall clock, which may be set meanwhile."""

    def observe(self, event: Event, now: float) -> None:
        """Take in an event that the view has applied and that arrived at `now`, in seconds of the monotonic clock."""
        if isinstance(event, Pulse | ClusterReady) and self._view.progress is not None:
            self._idle = self._view.progress.idle_seconds, now

    def unreported_stall(self, now: float) -> Stalled | None:
        """Return a stall that the rollout worker cannot report because it does not answer; None if there is none.

        `now` is in seconds of the monotonic clock.
        """
        seconds = self.idle_seconds(now)
        if "rollout" not in self._view.silent or not self._stall.due(seconds, self._warn_seconds):
            return None
        pulse = self._view.last(Pulse)
        return Stalled(
            time=time(),
            seconds=seconds,
            queue=pulse.queue if pulse is not None else 0,
            collected=pulse.collected if pulse is not None else 0,
            wanted=pulse.wanted if pulse is not None else 0,
        )

    def stalled_for(self, now: float) -> float:
        """Return the seconds since the last progress, or 0 if they are too few for a warning.

        A rollout worker that answers knows how long this run may need (`Pulse.warn_seconds`).
        """
        seconds, pulse = self.idle_seconds(now), self._view.last(Pulse)
        warn_seconds = self._warn_seconds
        if pulse is not None and "rollout" not in self._view.silent:
            warn_seconds = max(warn_seconds, pulse.warn_seconds)
        return seconds if seconds >= warn_seconds else 0.0

    def idle_seconds(self, now: float) -> float:
        """Return the seconds since the last progress; 0 before the run starts."""
        if self._idle is None:
            return 0.0
        seconds, arrived_at = self._idle
        return seconds + now - arrived_at


def stall_facts(view: RunView) -> dict[str, Any]:
    """Return the state of learner, rollout, window and engines as the keys of one log line."""
    busy, publishing = view.engine_use.last, view.publishes.running
    facts: dict[str, Any] = {
        "trainer": view.learner.phase or "start",
        "publishing_version": publishing.version if publishing is not None else None,
        "groups": {str(state): count for state, count in view.groups.counts.items() if count},
        "requests_in_flight": busy.in_flight if busy is not None else 0,
        "silent": {process: f"{seconds:.0f}s" for process, seconds in view.silent.items()} or "none",
        "engines": {
            name: {"state": view.engines.known[name].state, "version": version}
            for name, version in view.engines.versions.items()
        },
    }
    if (pulse := view.last(Pulse)) is not None:
        # The router does not report which engine it chose, so all routed engines are named.
        routed = " or ".join(view.engines.routed) or "none is routed"
        facts |= {
            "head": pulse.head,
            "head_state": pulse.head_state or "not admitted",
            "head_age": f"{pulse.head_seconds:.0f}s",
            "held_back_by_window": pulse.blocked,
            "oldest_request": f"group {pulse.oldest}, {pulse.oldest_seconds:.0f}s" if pulse.generating else "none",
            "oldest_request_engine": routed if pulse.generating else "none",
            "waiting_for_reward": pulse.rewarding,
            "admission_waits_for": pulse.waits_for or "nothing",
            "admission_waits": f"{pulse.waits_seconds:.0f}s",
            "trainer_version": pulse.trainer_version,
            "live_version": pulse.live_version,
        }
    return facts
