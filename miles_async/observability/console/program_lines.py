"""The plain lines on stdout, which programs read."""

from __future__ import annotations

from typing import TextIO

from miles_async.events import (
    BatchDrained,
    Evaluated,
    Event,
    RunStarted,
    SampleDisplayed,
    Stalled,
    StepStarted,
    WarningRaised,
)
from miles_async.observability.console.lines import write_line


class PlainLines:
    """Prints the lines that users of Miles and slime grep for, and warnings, in the same form for every log format.

    `only_warnings` leaves out all other lines, for a terminal that shows the same otherwise.

    - The line of the placement group is printed when the run starts, and an `eval` line for each data set when an
      evaluation ends, with the mean reward and the fraction of truncated samples.
    - The `Save debug rollout data` line is printed when the training step of a saved batch begins.
    - `First rollout sample` shows the first sample that was displayed since the previous batch, and `Finish rollout`
      the last one before a batch leaves the queue. Few samples are displayed (`sample_interval_seconds`), so a short
      rollout may have neither line.
    - The queue line is printed when a batch leaves the queue.
    - The staleness line is printed when the training step of that batch begins. Its average and maximum cover the
      groups that enter the step. `recycled` counts the groups recycled since the previous staleness line.
    - The `No progress` line is printed at each stall.
    """

    def __init__(
        self, stream: TextIO, *, only_warnings: bool = False, devices: int = 0, saved: str | None = None
    ) -> None:
        """`devices` is the number that the run reserves; `saved` is the path template of saved batches, if any."""
        self._stream = stream
        self._only_warnings = only_warnings
        self._devices = devices
        self._saved = saved
        self._recycled = 0
        self._sample: SampleDisplayed | None = None
        """The newest sample since the previous batch."""

    def observe(self, event: Event) -> None:
        match event:
            case Stalled():
                self._print(
                    f"Warning: No progress for {event.seconds:.0f}s. Queue size: {event.queue}, "
                    f"Collected: {event.collected}/{event.wanted}"
                )
            case WarningRaised():
                self._print(f"Warning: {event.text}")
            case _ if self._only_warnings:
                pass
            case RunStarted():
                self._print(f"Creating placement group with {self._devices} devices...")
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
                if self._saved is not None:
                    self._print(f"Save debug rollout data to {self._saved.format(rollout_id=event.rollout)}")
                average = sum(event.staleness) / len(event.staleness)
                self._print(
                    f"Staleness stats: recycled={self._recycled}, avg_staleness={average:.2f}, "
                    f"max_staleness={max(event.staleness)}"
                )
                self._recycled = 0
            case Evaluated():
                name = f"eval/{event.name}"
                scores = {name: event.reward, f"{name}-truncated_ratio": event.truncated}
                self._print(f"eval {event.rollout}: {scores}")

    def _print(self, line: str) -> None:
        write_line(line, self._stream)


def _sample_text(sample: SampleDisplayed) -> str:
    return f"{[sample.prompt + sample.response]}, label: {sample.label}, reward: {sample.reward}"
