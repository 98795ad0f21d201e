"""Board and charts together: what the live page shows of a run, and the report of it afterwards."""

from __future__ import annotations

from threading import Lock
from typing import Any, Literal

from miles_async.observability.board import Board
from miles_async.observability.charts import Charts
from miles_async.observability.events import Event

Span = Literal["recent", "whole"]


class View:
    """Written by the thread that hears the events, read by those that answer browsers."""

    def __init__(self, *, recent: bool = True) -> None:
        """`recent`: whether the last minutes are kept apart too."""
        self._lock = Lock()
        self._board = Board()
        self._charts = Charts(recent=recent)

    def observe(self, event: Event) -> None:
        with self._lock:
            self._board.observe(event)
            self._charts.observe(event)

    def state(self, span: Span, now: float) -> dict[str, Any]:
        """Plain values for JSON: how things stand `now`, and the series of a span."""
        with self._lock:
            return {
                "now": self._board.figures(now),
                "span": span,
                "figures": self._charts.figures(span, self._board.until(now)),
            }

    def phases(self, now: float) -> list[tuple[float, float, str]]:
        """The verdict that held for most of the time: (start, end, verdict), in seconds since the run began."""
        with self._lock:
            return self._charts.verdicts(self._board.until(now))
