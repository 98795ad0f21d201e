"""The publishes of a run: the newest version that is live, durations and bytes."""

from __future__ import annotations

from collections import deque
from statistics import median

from miles_async.events import PublishEnded, PublishStarted

RECENT_PUBLISHES = 16
MAX_VALUES = 1024
"""Most values of a duration that are kept in memory."""


class Milliseconds:
    """A duration that is measured many times. Of more than `MAX_VALUES` values, every n-th is kept for the median."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stride = 1
        """n; it doubles when `MAX_VALUES` values are kept."""
        self._measured = 0
        self.max: float | None = None

    def add(self, seconds: float) -> None:
        value = 1e3 * seconds
        self.max = value if self.max is None else max(self.max, value)
        if self._measured % self._stride == 0:
            self._values.append(value)
        self._measured += 1
        if len(self._values) == MAX_VALUES:
            self._values = self._values[::2]
            self._stride *= 2

    @property
    def median(self) -> float | None:
        return median(self._values) if self._values else None


class Publishes:
    """Publishes that went live. Version 0, the initial weights, is not counted."""

    def __init__(self) -> None:
        self.running: PublishStarted | None = None
        self.version = 0
        """The newest version that was published."""
        self.whole, self.pause = Milliseconds(), Milliseconds()
        """From the start of staging until every engine decodes again, or has loaded the adapter, and the part of it in
        which engines paused."""
        self.bytes = 0
        self.recent: deque[PublishEnded] = deque(maxlen=RECENT_PUBLISHES)

    def start(self, event: PublishStarted) -> None:
        self.running = event

    def end(self, event: PublishEnded) -> None:
        self.running = None
        if event.live and event.version > 0:
            self.version = max(self.version, event.version)
            self.whole.add(event.staged_seconds + max(event.paused_seconds, event.write_seconds))
            self.pause.add(event.paused_seconds)
            self.bytes += event.bytes
            self.recent.append(event)
