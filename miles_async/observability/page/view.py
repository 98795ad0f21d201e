"""What the live page and the report show of a run: its status, its charts and its samples."""

from __future__ import annotations

from threading import Lock
from typing import Any, Literal

from miles_async.events import Event, RunStarted
from miles_async.observability.page.charts import Charts
from miles_async.observability.page.samples import SampleLog
from miles_async.observability.page.status import RunStatus

Span = Literal["recent", "whole"]


class View:
    """Status, charts and samples behind one lock: one thread passes events, and the threads of the HTTP server read."""

    def __init__(self, *, recent: bool = True) -> None:
        """`recent` selects whether the last minutes are also kept at a finer resolution."""
        self._lock = Lock()
        self._status = RunStatus()
        self._charts = Charts(recent=recent)
        self._samples = SampleLog()

    def observe(self, event: Event) -> None:
        with self._lock:
            self._status.observe(event)
            self._charts.observe(event)
            self._samples.observe(event)

    def state(self, span: Span, now: float) -> dict[str, Any]:
        """Return the status at `now` (wall-clock seconds) and the series of a span, as plain values for JSON."""
        with self._lock:
            return {
                "now": self._status.figures(now),
                "span": span,
                "figures": self._charts.figures(span, self._status.until(now)),
                "rewards": self._charts.rewards(),
                "samples_revision": self._samples.revision,
            }

    @property
    def run(self) -> RunStarted | None:
        """The first event of the run, if it has started."""
        with self._lock:
            return self._status.run

    def samples(self) -> dict[str, Any]:
        """Return the newest samples, newest first, and the revision that changes with them."""
        with self._lock:
            return {"revision": self._samples.revision, "samples": self._samples.figures()}

    def phases(self, now: float) -> list[tuple[float, float, str]]:
        """Return the dominant verdict over time as (start, end, verdict), in seconds since the run began."""
        with self._lock:
            return self._charts.verdicts(self._status.until(now))
