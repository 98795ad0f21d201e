"""One line per training step that says all of it: to be read, grepped and parsed instead of pieced together."""

from __future__ import annotations

from typing import Any

import structlog

from miles_async.events import BatchDrained, Event, PublishEnded, StepEnded, StepStarted

log = structlog.get_logger(__name__)


class Steps:
    """Logs `step` at the end of each, and binds every line after to its rollout and weight version."""

    def __init__(self) -> None:
        self._drained: BatchDrained | None = None
        self._started: StepStarted | None = None
        self._publish: PublishEnded | None = None

    def observe(self, event: Event) -> None:
        match event:
            case BatchDrained():
                self._drained = event
            case StepStarted():
                self._started = event
                structlog.contextvars.bind_contextvars(rollout=event.rollout, version=event.version)
            case PublishEnded():
                self._publish = event
            case StepEnded():
                log.info("step", **self._facts(event))
            case _:
                pass

    def _facts(self, event: StepEnded) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "rollout": event.rollout,
            "seconds": round(event.ended - event.started, 3),
            "tokens": event.tokens,
            "reward": round(event.reward, 4),
            "response_length": round(event.response_length, 2),
        }
        if (started := self._started) is not None:
            facts |= {
                "version": started.version,
                "groups": len(started.groups),
                "staleness_mean": round(sum(started.staleness) / len(started.staleness), 2),
                "staleness_max": max(started.staleness),
            }
        if (drained := self._drained) is not None:
            facts |= {"waited": round(drained.waited, 3), "queue": drained.depth, "recycled": drained.recycled}
        if (publish := self._publish) is not None:
            facts |= {"last_publish": publish.version, "last_pause": round(publish.paused_seconds, 3)}
        facts |= {name: round(value, 5) for name, value in event.metrics.items()}
        return facts if event.finite else {**facts, "finite": False}
