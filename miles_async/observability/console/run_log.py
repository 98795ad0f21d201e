"""The log lines about events: problems, changes of engines and router, and one line with every value of each step."""

from __future__ import annotations

from typing import Any

import structlog

from miles_async.config.schema import RunConfig
from miles_async.events import (
    BatchDrained,
    CollapseRiskChanged,
    DataSkipped,
    DeadLettersUnwritten,
    EngineChanged,
    EvaluationSkipped,
    Event,
    PublishEnded,
    RouterChanged,
    RunDrained,
    Stalled,
    StepEnded,
    StepStarted,
    VerdictChanged,
    WriteFailed,
)
from miles_async.observability.console.logging import details_logger
from miles_async.observability.console.stall_report import stall_facts
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.view import RunView

MAX_SKIPPED_SHOWN = 10
"""Most skipped data rows shown on the terminal, so that a file with many invalid rows does not flood it."""

log = structlog.get_logger(__name__)
details = details_logger(__name__)


class RunLog:
    """Logs the events of a run, and binds later log lines to the step's rollout and weight version."""

    def __init__(self, view: RunView, config: RunConfig, folder: RunFolder) -> None:
        self._view = view
        self._config = config
        self._folder = folder
        self._skipped = 0
        self._unwritten = 0
        """Number of dead letters that are not written yet."""
        self._router_answers: bool | None = None
        """What the last event of the router reported."""

    def observe(self, event: Event) -> None:
        """Log an event that the view has applied."""
        match event:
            case StepStarted():
                of_adapter = {"adapter": event.adapter} if event.adapter else {}
                structlog.contextvars.bind_contextvars(rollout=event.rollout, version=event.version, **of_adapter)
            case StepEnded():
                details.info("step", **_step_facts(event, self._view))
            case DataSkipped():
                self._log_skipped(event)
            case VerdictChanged():
                details.info("verdict", verdict=event.verdict, why=event.why, knob=event.knob)
            case CollapseRiskChanged():
                if event.high:
                    log.warning("the policy may collapse soon", why=event.why, knob=event.knob)
                else:
                    log.info("the signs of a collapse are gone", why=event.why)
            case Stalled():
                details.warning("stall", verdict=self._view.finding.verdict, **stall_facts(self._view))
            case WriteFailed():
                log.warning(
                    "weight write failed",
                    engine=event.engine,
                    version=event.version,
                    then=event.then,
                    transport=event.transport,
                    error=event.error,
                )
            case DeadLettersUnwritten():
                self._log_unwritten(event)
            case EngineChanged():
                self._log_engine(event)
            case EvaluationSkipped():
                log.info("evaluation skipped", rollout=event.rollout, overtaken_by=event.overtaken_by)
            case RouterChanged():
                self._log_router(event)
            case RunDrained():
                self._log_drain(event)

    def _log_engine(self, event: EngineChanged) -> None:
        facts = {"engine": event.engine, "version": event.version, "reason": event.reason}
        if event.state != "routed":
            log.warning(f"engine {event.state}", **facts)
        elif event.version is not None:
            log.info("engine routed", **facts)
        else:  # for the first time, which is news only if a lost engine is replaced
            details.info("engine routed", **facts)

    def _log_router(self, event: RouterChanged) -> None:
        before, self._router_answers = self._router_answers, event.up
        facts = {"engines": event.engines, "healthy": event.healthy}
        if not event.up:
            log.warning("router does not answer", **facts)
        elif before is False:
            log.info("router answers", **facts)
        else:
            details.info("router answers", **facts)

    def _log_drain(self, event: RunDrained) -> None:
        facts = {
            "seconds": round(event.seconds, 1),
            "finished": event.finished,
            "interrupted": event.interrupted,
            "abandoned": event.abandoned,
            "kept": event.kept,
            "unsaved": event.unsaved,
        }
        if event.abandoned or (event.unsaved and self._config.learner.save is not None):
            log.warning("the run was drained, but its step or checkpoint needed more than --drain-seconds", **facts)
        else:
            log.info("the run was drained", **facts)

    def _log_unwritten(self, event: DeadLettersUnwritten) -> None:
        before, self._unwritten = self._unwritten, event.letters
        if event.letters and not before:
            log.warning(
                "dead letters cannot be written; they are kept in memory and written later",
                file=str(self._folder.dead_letters),
                error=event.error,
            )
        if before and not event.letters:
            log.info("all dead letters are written", file=str(self._folder.dead_letters))

    def _log_skipped(self, event: DataSkipped) -> None:
        self._skipped += 1
        if self._skipped <= MAX_SKIPPED_SHOWN:
            log.warning("data skipped", reason=event.reason, what=event.sentence)
        if self._skipped == MAX_SKIPPED_SHOWN:
            log.warning("further skipped data is only in the event log", file=str(self._folder.events))


def _step_facts(event: StepEnded, view: RunView) -> dict[str, Any]:
    """Return every value of a step, so that scripts parse one line instead of joining several."""
    facts: dict[str, Any] = {
        "rollout": event.rollout,
        "seconds": round(event.seconds, 3),
        "tokens": event.tokens,
        "reward": round(event.reward, 4),
        "response_length": round(event.response_length, 2),
    }
    if (started := view.last(StepStarted)) is not None:
        facts |= {
            "version": started.version,
            "groups": len(started.groups),
            "staleness_mean": round(sum(started.staleness) / len(started.staleness), 2),
            "staleness_max": max(started.staleness),
        }
    if (drained := view.last(BatchDrained)) is not None:
        facts |= {"waited": round(drained.waited, 3), "queue": drained.depth, "recycled": drained.recycled}
    if (publish := view.last(PublishEnded)) is not None:
        facts |= {"last_publish": publish.version, "last_pause": round(publish.paused_seconds, 3)}
    facts |= {name: round(value, 5) for name, value in event.metrics.items()}
    return facts if event.finite else {**facts, "finite": False}
