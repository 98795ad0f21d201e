"""The three plain lines that users grep for (seed `fully-async`), and warnings, on stdout, whatever the log format."""

from __future__ import annotations

from typing import TextIO

from tqdm import tqdm

from miles_async.events import BatchDrained, Event, Stalled, StepStarted, WarningRaised


class Lines:
    """The queue line as a batch leaves the queue, the staleness line as its step begins, the warning at each stall.

    Average and maximum speak of the groups that enter the step, never of those thrown away; `recycled` counts what was
    thrown away since the staleness line before.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._recycled = 0

    def observe(self, event: Event) -> None:
        match event:
            case BatchDrained():
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
        # tqdm.write moves a progress bar on the same terminal out of the way; without one it only writes.
        tqdm.write(line, file=self._stream)
        self._stream.flush()
