"""The table with one row per trained batch: columns of fixed width, in less than 80 characters.

If the run trains several adapters, the name of the batch's adapter stands at the end.
"""

from __future__ import annotations

from miles_async.events import BatchDrained, RunStarted, StepEnded, StepStarted
from miles_async.observability.console.quantities import DURATION_WIDTH, RATE_WIDTH, duration, rate
from miles_async.observability.view import RunView

ROWS_PER_HEADING = 20
"""Rows between two repetitions of the column names."""


class BatchTable:
    """Formats the rows of the table; `row` returns one or two lines of text."""

    def __init__(self, run: RunStarted, view: RunView) -> None:
        self._view = view
        self._batches = run.rollouts
        has_small_ages = run.staleness_limit is not None and run.staleness_limit < 10
        self._columns = {
            "batch": 2 * len(str(run.rollouts)) + 1,
            "reward": 7,
            "staleness": 9 if has_small_ages else 11,
            "queue": len(str(run.queue_capacity)),
            "groups/s": RATE_WIDTH,
            "step": DURATION_WIDTH,
            "wait": DURATION_WIDTH,
            "tokens/s": RATE_WIDTH,
        }
        """Names, and the most characters of a usual cell. A longer cell makes its row longer, and is not cut."""
        self._rows = 0
        self._previous_end: float | None = None

    def row(self, event: StepEnded) -> str:
        """Return the row of the batch whose step ended, below the column names if they are due.

        Rates cover the time since the end of the previous step. Values without an event are dashes.
        """
        drained, started = self._view.last(BatchDrained), self._view.last(StepStarted)
        waited = drained.waited if drained is not None else 0.0
        seconds = event.seconds + waited if self._previous_end is None else event.time - self._previous_end
        self._previous_end = event.time
        cells = [
            f"{event.rollout + 1}/{self._batches}",
            f"{event.reward:.3f}" if abs(event.reward) < 100 else rate(event.reward),
            _staleness(started.staleness) if started is not None else "-",
            str(drained.depth) if drained is not None else "-",
            rate(len(started.groups) / seconds) if started is not None and seconds > 0 else "-",
            duration(event.seconds),
            duration(waited) if drained is not None else "-",
            rate(event.tokens / seconds) if seconds > 0 else "-",
        ]
        adapter = started.adapter if started is not None else ""
        row = self._line([*cells, adapter]) + ("" if event.finite else "  skipped: not finite")
        heading_is_due = self._rows % ROWS_PER_HEADING == 0
        self._rows += 1
        heading = self._line([*self._columns, "adapter" if adapter else ""])
        return f"\n{heading}\n{row}" if heading_is_due else row

    def _line(self, cells: list[str]) -> str:
        *numbers, adapter = cells
        widths = [max(width, len(name)) for name, width in self._columns.items()]
        aligned = [f"{cell:>{width}}" for cell, width in zip(numbers, widths, strict=True)]
        return "  ".join([*aligned, adapter] if adapter else aligned)


def _staleness(ages: list[int]) -> str:
    return f"{sum(ages) / len(ages):.1f} max {max(ages)}"
