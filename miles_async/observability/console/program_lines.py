"""The plain lines on stdout, which programs read."""

from __future__ import annotations

from typing import TextIO

from miles_async.events import (
    BatchDrained,
    Event,
    SampleDisplayed,
    Stalled,
    StepStarted,
    WarningRaised,
)
from miles_async.observability.console.lines import write_line


class PlainLines:
    """Prints the lines that users of Miles and slime grep for, and warnings, in the same form for every log format.

    `only_warnings` leaves out samples, the queue line and the staleness line, for a terminal that shows the same
    otherwise.

    - `First rollout sample` shows the first sample that was displayed since the previous batch, and `Finish rollout`
      the last one before a batch leaves the queue. Few samples are displayed (`sample_interval_seconds`), so a short
      rollout may have neither line.
    - The queue line is printed when a batch leaves the queue.
    - The staleness line is printed when the training step of that batch begins. Its average and maximum cover the
      groups that enter the step. `recycled` counts the groups recycled since the previous staleness line.
    - The `No progress` line is printed at each stall.
    """

    def __init__(self, stream: TextIO, *, only_warnings: bool = False) -> None:
        self._stream = stream
        self._only_warnings = only_warnings
        self._recycled = 0
        self._sample: SampleDisplayed | None = None
        """The newest sample since the previous batch."""

    def observe(self, event: Event) -> None:
        match event:
            case SampleDisplayed() | BatchDrained() | StepStarted() if self._only_warnings:
                pass
            case SampleDisplayed():
                if self._sample is None:
                    self._print(f"First rollout sample: {_sample_text(event)}")
                self._sample = event
            case BatchDrained():
                if self._sample is not None:
                    self._print(f"Finish rollout: {_sample_text(self._sample)}")
                self._sample = None
                self._recycled += event.recycled
                self._print(f"Global worker queue size: {event.depth}")
            case StepStarted():
                average = sum(event.staleness) / len(event.staleness)
                self._print(
                    f"Staleness stats: recycled={self._recycled}, avg_staleness={average:.2f}, "
                    f"max_staleness={max(event.staleness)}"
                )
                self._recycled = 0
            case Stalled():
                self._print(
                    f"Warning: No progress for {event.seconds:.0f}s. Queue size: {event.queue}, "
                    f"Collected: {event.collected}/{event.wanted}"
                )
            case WarningRaised():
                self._print(f"Warning: {event.text}")
            case _:
                pass

    def _print(self, line: str) -> None:
        write_line(line, self._stream)


def _sample_text(sample: SampleDisplayed) -> str:
    return f"{[sample.prompt + sample.response]}, label: {sample.label}, reward: {sample.reward}"
