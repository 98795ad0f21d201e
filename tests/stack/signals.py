"""Signals to processes of a run, in the middle of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from miles_async.observability.events import Event, GroupMoved, StepEnded


class Signals:
    """Sent to process groups, each when the first group of its rollout has gone to the engines.

    Each is the number of the rollout, the process group, and the signal.
    """

    def __init__(self, signals: Iterator[tuple[int, int, signal.Signals]]) -> None:
        self._signals = signals
        self._next = next(signals, None)
        self._steps = 0

    def watch(self, event: Event) -> None:
        self._steps += isinstance(event, StepEnded)
        at_the_engines = isinstance(event, GroupMoved) and event.after == "in_flight"
        if self._next is not None and at_the_engines and self._steps == self._next[0]:
            os.killpg(self._next[1], self._next[2])
            self._next = next(self._signals, None)
