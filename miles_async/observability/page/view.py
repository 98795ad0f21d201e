"""Board and charts together: what the live page shows of a run, and the report of it afterwards."""

from __future__ import annotations

from threading import Lock
from typing import Any, Literal

from miles_async.events import Event
from miles_async.observability.page.charts import Charts
from miles_async.observability.page.status import RunStatus

Span = Literal["recent", "whole"]


class View:
    """Written by the thread that hears the events, read by those that answer browsers."""

    def __init__(self, *, recent: bool = True) -> None:
        """`recent`: whether the last minutes are kept apart too."""
        self._lock = Lock()
        self._status = RunStatus()
        self._charts = Charts(recent=recent)

    def observe(self, event: Event) -> None:
        with self._lock:
            self._status.observe(event)
            self._charts.observe(event)

    def state(self, span: Span, now: float) -> dict[str, Any]:
        """Plain values for JSON: how things stand `now`, and the series of a span."""
        with self._lock:
            return {
                "now": self._status.figures(now),
                "span": span,
                "figures": self._charts.figures(span, self._status.until(now)),
            }

    def phases(self, now: float) -> list[tuple[float, float, str]]:
        """The verdict that held for most of the time: (start, end, verdict), in seconds since the run began."""
        with self._lock:
            return self._charts.verdicts(self._status.until(now))
