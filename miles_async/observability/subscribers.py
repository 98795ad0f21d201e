"""Passes the events of a run to its view, and then to all projections of the view: metrics, page, lines, summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import structlog
from prometheus_client import CollectorRegistry

from miles_async.atomic_files import write_atomically
from miles_async.config.device_plan import demand_of
from miles_async.config.redaction import redacted_values
from miles_async.config.schema import RunConfig
from miles_async.events import Event, RunEnded
from miles_async.observability.console.log_tail import LogTail
from miles_async.observability.console.program_lines import PlainLines
from miles_async.observability.console.run_log import RunLog
from miles_async.observability.console.stall_report import StallReport
from miles_async.observability.console.terminal import ProgressBar, Terminal, is_interactive
from miles_async.observability.diagnosis.verdict import Announcements
from miles_async.observability.http_server import HttpServer
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.metrics.scrape_targets import ScrapeTargets
from miles_async.observability.metrics.trackers import Trackers
from miles_async.observability.page.document import LivePage
from miles_async.observability.page.report import RunData, flatten, report
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.snapshot import Snapshot, nothing_known, read_snapshot, write_snapshot
from miles_async.observability.summary import summary_text, write_summary
from miles_async.observability.trace.event_log import EventLogWriter, read_events
from miles_async.observability.trace.perfetto import PerfettoTrace

FILE_SECONDS = 1.0
"""Time between two writes of buffered files, and between two looks at the log files of other processes."""

log = structlog.get_logger(__name__)


class EventSubscribers:
    """Passes each event to all subscribers, and writes the summary and the report when the run ends.

    The pipeline never waits for a subscriber. Use it as a context manager, which closes all files and servers.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, *, continued: bool = False) -> None:
        """`continued` is whether another driver of the run has already written to the event log.

        Raises UserError if the metrics port is already in use, or if the event log is damaged.
        """
        registry = CollectorRegistry()
        known = (read_snapshot(folder.snapshot) if continued else None) or nothing_known()
        self._view = view = known.view
        self._collapse = known.collapse
        self._metrics = MetricsRecorder(registry, view)
        if known.metrics is not None:
            self._metrics.restore(known.metrics)
        folders = {"run": folder.path, "store": folder.store}
        if (save := config.learner.save_folder) is not None:
            folders["save"] = save
        self._metrics.watch_disks(folders)
        self._write_failed = False
        settings = config.observability
        self._event_log = EventLogWriter(
            folder.events,
            rotate_bytes=settings.event_log_rotate_bytes,
            max_bytes=settings.event_log_max_bytes,
            on_error=self._warn_of_write,
            on_rotate=self._write_snapshot,
        )
        self._perfetto = (
            PerfettoTrace(view, folder.trace, settings.trace_max_bytes, self._warn_of_write, known.trace)
            if settings.trace
            else None
        )
        self._verdicts = Announcements()
        for event in read_events(folder.events, after=known.parts) if continued else ():
            self._record(event)
            self._collapse.observe(event)  # what it announced is in the log
        # Only now: a counter that grows while old events are read would look as if all of it had just happened.
        self._server = HttpServer(registry, LivePage(view, folder.path), settings.metrics_port)
        self.stall = StallReport(view, config.observability.no_progress_warn_seconds)
        self._log_tail = LogTail(folder.logs, settings.log_rotate_bytes, continued=continued)
        self._trackers = Trackers(view, config, folder)
        self._scrape_targets = ScrapeTargets(folder, self._server.url)
        self.update_scrape_targets({})
        self._plain_lines = PlainLines(
            sys.stdout,
            only_warnings=is_interactive(config) and not settings.plain_lines,
            devices=demand_of(config).bundles,
            saved=config.debug.rollout_file,
        )
        self._terminal = (
            Terminal(view, sys.stderr, config, folder, self.page_url) if settings.log_format == "console" else None
        )
        self._progress_bar = ProgressBar(sys.stderr, enabled=config.observability.progress_bar)
        self._run_log = RunLog(view, config, folder)
        self._config = config
        self._folder = folder
        self._used_files_at = 0.0
        """When files were written and read last, in seconds of the monotonic clock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._terminal is not None:
            self._terminal.close()
        self._progress_bar.close()
        self._trackers.close()
        if self._perfetto is not None:
            self._perfetto.close()
        with self._surviving_loss_of(self._scrape_targets.path):
            self._scrape_targets.remove()
        self._server.close()
        self._event_log.close()

    @property
    def metrics_url(self) -> str:
        return self._server.url

    @property
    def page_url(self) -> str:
        return self._server.page_url

    def emit(self, *events: Event) -> None:
        for event in events:
            self._dispatch(event)

    def flush(self) -> None:
        """Write all events to the event log, so that they survive this process."""
        self._event_log.flush()

    def _record(self, event: Event) -> None:
        """Pass an event to the subscribers that describe the run as a whole."""
        self._view.apply(event)
        if self._perfetto is not None:
            self._perfetto.observe(event)
        self._metrics.observe(event)

    def _dispatch(self, event: Event) -> None:
        # The event log comes first: whatever a later subscriber does with the event, it is on disk.
        self._event_log.observe(event)
        self._record(event)
        self.stall.observe(event, time.monotonic())
        self._trackers.observe(event)
        self._plain_lines.observe(event)
        if self._terminal is not None:
            self._terminal.observe(event)
        self._progress_bar.observe(event)
        self._run_log.observe(event)
        if collapse := self._collapse.observe(event):
            self._dispatch(collapse)
        if isinstance(event, RunEnded):
            self.write_summary()
            self._write_report()
            print(summary_text(self._view), flush=True)

    def _write_snapshot(self, parts: int) -> None:
        trace = self._perfetto.written if self._perfetto is not None else None
        snapshot = Snapshot(parts, self._view, self._metrics.values(), self._collapse, trace)
        with self._surviving_loss_of(self._folder.snapshot):
            write_snapshot(self._folder.snapshot, snapshot)

    def write_summary(self, expected_end: RunEnded | None = None) -> None:
        """Write `summary.json`.

        With `expected_end`, the run has not ended, and this process may be killed before: the summary is written again
        with the actual event.
        """
        with self._surviving_loss_of(self._folder.summary):
            write_summary(self._view, self._folder.summary, expected_end)

    def _write_report(self) -> None:
        run = RunData(self._folder.path, flatten(redacted_values(self._config)), self._view)
        with self._surviving_loss_of(self._folder.report):
            write_atomically(self._folder.report, report([run]))

    @contextmanager
    def _surviving_loss_of(self, file: Path) -> Iterator[None]:
        """Warn instead of raising OSError if `file` cannot be written inside the block."""
        try:
            yield
        except OSError as error:
            self._warn_of_write(file, error)

    def _warn_of_write(self, file: Path, error: OSError) -> None:
        """Warn once that a file of the run cannot be written, for example because the disk is full.

        The run goes on without the file: training is worth more than its records.
        """
        if self._write_failed:
            return
        self._write_failed = True
        log.warning(
            "a file of the run cannot be written; the run continues, and its event log, trace, summary and report may "
            "be incomplete",
            file=str(file),
            error=error.strerror,
        )

    def update_scrape_targets(self, addresses: Mapping[str, str]) -> None:
        """Update the targets file with the addresses (`host:port` by name) of engines and router."""
        with self._surviving_loss_of(self._scrape_targets.path):
            self._scrape_targets.write(addresses)

    def tick(self, now: float) -> None:
        """Update everything that changes with time alone, several times a second.

        `now` is in seconds of the monotonic clock.
        """
        if stalled := self.stall.unreported_stall(now):
            self._dispatch(stalled)
        # Verdicts and metrics relate the present to the time stamps of events, which come from the wall clock.
        wall = time.time()
        finding = self._view.finding
        if self._view.learner.phase is not None and (
            changed := self._verdicts.take_change(finding, wall, self._view.advise)
        ):
            self._dispatch(changed)
        self._metrics.tick(wall)
        if self._terminal is not None:
            self._terminal.tick(wall, finding)
        if now - self._used_files_at >= FILE_SECONDS:
            self._used_files_at = now
            self._event_log.flush()
            self._log_tail.poll()
            if self._perfetto is not None:
                self._perfetto.flush()
