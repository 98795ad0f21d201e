"""Everyone who looks on at a run, together: events on disk, metrics, page, log lines, progress bar, trace, summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import structlog
from prometheus_client import CollectorRegistry

from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.events import (
    DataSkipped,
    EngineChanged,
    Event,
    RouterChanged,
    RunEnded,
    Stalled,
    VerdictChanged,
    WriteFailed,
)
from miles_async.observability.console.log_tail import LogTail
from miles_async.observability.console.terminal import PlainLines, ProgressBar, StepLog
from miles_async.observability.diagnosis.stall_report import StallReport
from miles_async.observability.diagnosis.verdict import Verdicts
from miles_async.observability.http_server import HttpServer
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.metrics.scrape_targets import ScrapeTargets
from miles_async.observability.metrics.trackers import Trackers
from miles_async.observability.page.document import LivePage
from miles_async.observability.page.report import RunData, flat, write
from miles_async.observability.page.view import View
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.summary import RunSummary
from miles_async.observability.trace.event_log import EventLogWriter
from miles_async.observability.trace.perfetto import PerfettoTrace

PASSED_OVER_SHOWN = 10
"""Rows that are named on the terminal when they are passed over; a file that is broken throughout must not flood it."""

log = structlog.get_logger(__name__)


class EventSubscribers:
    """Shows each event to all of them; `summary.json`, the report and the printed summary appear when the run ends."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        """Raises UserError when the metrics port cannot be had."""
        registry = CollectorRegistry()
        self._metrics = MetricsRecorder(registry)
        self._view = View()
        self._server = HttpServer(registry, LivePage(self._view), config.observability.metrics_port)
        self._trace = EventLogWriter(folder.events)
        self._perfetto = (
            PerfettoTrace(folder.trace, config.observability.trace_max_bytes) if config.observability.trace else None
        )
        self._summary = RunSummary()
        self._verdicts = Verdicts()
        self._stall = StallReport(config.observability.no_progress_warn_seconds)
        self._steps = StepLog()
        self._log_tail = LogTail(folder.logs)
        self._sinks = Trackers(config, folder)
        self._targets = ScrapeTargets(folder, self._server.url)
        self._targets.write({})
        self._lines = PlainLines(sys.stdout)
        self._progress = ProgressBar(sys.stderr, enabled=config.observability.progress_bar)
        self._config = config
        self._folder = folder
        self._passed_over = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.close()
        self._sinks.close()
        if self._perfetto is not None:
            self._perfetto.close()
        self._targets.remove()
        self._server.close()
        self._trace.close()  # the last, as it raises where the disk is full

    @property
    def metrics_url(self) -> str:
        return self._server.url

    @property
    def page_url(self) -> str:
        return self._server.page_url

    def emit(self, *events: Event) -> None:
        for event in events:
            self._show(event)

    def _show(self, event: Event) -> None:
        self._trace.observe(event)
        self._view.observe(event)
        if self._perfetto is not None:
            self._perfetto.observe(event)
        self._metrics.observe(event)
        self._summary.observe(event)
        self._verdicts.observe(event)
        self._stall.observe(event)
        self._steps.observe(event)
        self._sinks.observe(event)
        self._lines.observe(event)
        self._progress.observe(event)
        if isinstance(event, DataSkipped):
            self._warn(event)
        if isinstance(event, VerdictChanged):
            log.info("verdict", verdict=event.verdict, why=event.why, knob=event.knob)
        if isinstance(event, Stalled):
            log.warning("stall", verdict=self._verdicts.finding.verdict, **self._stall.facts())
        if isinstance(event, WriteFailed):
            log.warning(
                "weight write failed",
                engine=event.engine,
                version=event.version,
                then=event.then,
                transport=event.transport,
                error=event.error,
            )
        if isinstance(event, EngineChanged):
            tell = log.info if event.state == "routed" else log.warning
            tell(f"engine {event.state}", engine=event.engine, version=event.version, reason=event.reason)
        if isinstance(event, RouterChanged):
            tell = log.info if event.up else log.warning
            tell(f"router {'answers' if event.up else 'does not answer'}", engines=event.engines, healthy=event.healthy)
        if isinstance(event, RunEnded):
            self._write_summary()
            self._report(event.time)
            print(self._summary.text(), flush=True)

    def _write_summary(self) -> None:
        try:
            self._summary.write(self._folder.summary)
        except OSError as error:
            # It is printed all the same, and what ended the run is told after it.
            log.warning("no summary.json", why=f"{self._folder.path}: {error.strerror}")

    def _report(self, until: float) -> None:
        settings = flat(self._config.model_dump(mode="json"))
        told = RunData(self._folder.path.name, settings, self._view, self._summary, until)
        try:
            write([told], self._folder.report)
        except UserError as error:
            # The run itself is well; `make report` makes one from the events.
            log.warning("no report", why=str(error))

    def _warn(self, event: DataSkipped) -> None:
        self._passed_over += 1
        if self._passed_over <= PASSED_OVER_SHOWN:
            log.warning("data passed over", reason=event.reason, what=event.sentence)
        if self._passed_over == PASSED_OVER_SHOWN:
            log.warning("what else is passed over is only counted here", all_of_it=str(self._folder.events))

    def update_scrape_targets(self, addresses: Mapping[str, str]) -> None:
        """Engines and router serve metrics of their own at these addresses."""
        self._targets.write(addresses)

    def stalled_for(self, now: float) -> float:
        """Seconds since the last progress, where that is long enough for a warning; else 0."""
        return self._stall.stalled_for(now)

    def tick(self, now: float) -> None:
        """Move on what grows with time alone."""
        if stalled := self._stall.unreported_stall(now):
            self._show(stalled)
        self._verdicts.tick(now)
        if found := self._verdicts.take_change(now):
            self._show(found)
        self._metrics.set_verdict(self._verdicts.finding.verdict, self._verdicts.trainer_seconds)
        self._metrics.tick(now)
        self._trace.tick(now)
        self._log_tail.poll(now)
        if self._perfetto is not None:
            self._perfetto.tick(now)
