"""What the live page and the report show of a run: its status and its charts."""

from __future__ import annotations

from threading import Lock
from typing import Any, Literal

from miles_async.events import Event
from miles_async.observability.page.charts import Charts
from miles_async.observability.page.status import RunStatus

Span = Literal["recent", "whole"]


class View:
    """Status and charts behind one lock: one thread passes events, and the threads of the HTTP server read."""

    def __init__(self, *, recent: bool = True) -> None:
        """`recent` selects whether the last minutes are also kept at a finer resolution."""
        self._lock = Lock()
        self._status = RunStatus()
        self._charts = Charts(recent=recent)

    def observe(self, event: Event) -> None:
        with self._lock:
            self._status.observe(event)
            self._charts.observe(event)

    def state(self, span: Span, now: float) -> dict[str, Any]:
        """Return the status at `now` (wall-clock seconds) and the series of a span, as plain values for JSON."""
        with self._lock:
            return {
                "now": self._status.figures(now),
                "span": span,
                "figures": self._charts.figures(span, self._status.until(now)),
            }

    def phases(self, now: float) -> list[tuple[float, float, str]]:
        """Return the dominant verdict over time as (start, end, verdict), in seconds since the run began."""
        with self._lock:
            return self._charts.verdicts(self._status.until(now))
