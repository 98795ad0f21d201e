"""Figures over time in bounded memory: time is cut into buckets, and where they get too many, neighbours are merged.

A day of a run so takes as much room as a minute of it, and every bucket still knows its lowest and highest value: what
was seen for a moment only is not averaged away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any


class Kind(StrEnum):
    """What a bucket's figure is."""

    MEAN = "mean"
    """The mean of single observations."""
    HELD = "held"
    """The mean over time of something that keeps its value until it changes."""
    RATE = "rate"
    """The sum per second; of seconds, a share."""


@dataclass(slots=True)
class Bucket:
    weight: float = 0.0
    """Observations, or seconds."""
    total: float = 0.0
    low: float = inf
    high: float = -inf

    def add(self, value: float, weight: float) -> None:
        self.weight += weight
        self.total += value * weight
        if value < self.low:
            self.low = value
        if value > self.high:
            self.high = value

    def absorb(self, other: Bucket) -> None:
        self.weight += other.weight
        self.total += other.total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)


@dataclass(slots=True)
class _Held:
    value: float
    since: float


class Timeline:
    """Series by name, over one grid of at most `places` buckets that begins at `began` (wall-clock seconds).

    A rolling one keeps its bucket width and forgets the oldest; the others keep everything and double their width.
    """

    def __init__(self, began: float, *, width: float, places: int, rolling: bool = False) -> None:
        self._began = began
        self._width = width
        self._places = places
        self._rolling = rolling
        self._first = 0
        self._last = 0
        self._kinds: dict[str, Kind] = {}
        self._series: dict[str, dict[int, Bucket]] = {}
        self._held: dict[str, _Held] = {}

    def note(self, name: str, time: float, value: float) -> None:
        """One observation."""
        self._bucket(name, Kind.MEAN, self._place(time)).add(value, 1.0)

    def count(self, name: str, time: float, amount: float) -> None:
        """Add to a rate."""
        self._bucket(name, Kind.RATE, self._place(time)).add(amount, 1.0)

    def spread(self, name: str, start: float, end: float, share: float = 1.0) -> None:
        """Something took `share` of the time from `start` to `end`."""
        for place, seconds in self._covered(start, end):
            self._bucket(name, Kind.RATE, place).add(seconds * share, 1.0)

    def hold(self, name: str, time: float, value: float) -> None:
        """From now on it is `value`."""
        held = self._held.get(name)
        if held is None:
            self._held[name] = _Held(value, time)
        elif held.value == value:
            return
        else:
            self._keep(name, held, time)
            held.value = value
        # A value that lasts no time is one of the lowest or highest all the same.
        self._bucket(name, Kind.HELD, self._place(time)).add(value, 0.0)

    def settle(self, now: float) -> None:
        """Bring what is held up to `now`."""
        self._place(now)
        for name, held in self._held.items():
            self._keep(name, held, now)

    def _keep(self, name: str, held: _Held, until: float) -> None:
        if until <= held.since:
            return
        place = self._place(until)
        if self._began + place * self._width <= held.since:
            # Nearly always: changes come many to a bucket.
            self._bucket(name, Kind.HELD, place).add(held.value, until - held.since)
        else:
            for place, seconds in self._covered(held.since, until):
                self._bucket(name, Kind.HELD, place).add(held.value, seconds)
        held.since = until

    def _place(self, time: float) -> int:
        """The bucket of `time`, after making room for it."""
        place = max(self._first, int((time - self._began) / self._width))
        if place > self._last:
            self._last = place
            while self._last - self._first >= self._places:
                self._make_room()
            place = self._last
        return place

    def _make_room(self) -> None:
        if self._rolling:
            first = self._last - self._places + 1
            gone = range(self._first, min(first, self._first + self._places))
            for buckets in self._series.values():
                for place in gone:
                    buckets.pop(place, None)
            self._first = first
            return
        self._width *= 2
        self._last //= 2
        for name, buckets in self._series.items():
            merged: dict[int, Bucket] = {}
            for place, bucket in buckets.items():
                merged.setdefault(place // 2, Bucket()).absorb(bucket)
            self._series[name] = merged

    def _covered(self, start: float, end: float) -> Iterator[tuple[int, float]]:
        """The buckets between two times, with the seconds in each."""
        last = self._place(end)
        start = max(start, self._began + self._first * self._width)
        place = self._place(start)
        while place <= last and start < end:
            edge = min(end, self._began + (place + 1) * self._width)
            if edge > start:
                yield place, edge - start
            start, place = max(start, edge), place + 1

    def _bucket(self, name: str, kind: Kind, place: int) -> Bucket:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = {}
            self._kinds[name] = kind
        bucket = series.get(place)
        if bucket is None:
            bucket = series[place] = Bucket()
        return bucket

    def dominant(self, prefix: str) -> list[tuple[float, float, str]]:
        """Stretches of time and what fills most of each: (start, end, rest of the name), of the series `prefix…`."""
        names = [name for name in self._series if name.startswith(prefix)]
        stretches: list[tuple[float, float, str]] = []
        for place in range(self._first, self._last + 1):
            seconds = {name: self._series[name][place].total for name in names if place in self._series[name]}
            if not seconds:
                continue
            chief = max(seconds, key=lambda name: seconds[name]).removeprefix(prefix)
            start = place * self._width
            if stretches and stretches[-1][2] == chief and stretches[-1][1] == start:
                start = stretches.pop()[0]
            stretches.append((start, (place + 1) * self._width, chief))
        return stretches

    def figures(self) -> dict[str, Any]:
        """`width` and `start` (seconds since it began), and of each series `mean`, `low` and `high`, one per bucket."""
        series = {name: self._curve(buckets, self._kinds[name]) for name, buckets in self._series.items()}
        return {"start": self._first * self._width, "width": self._width, "series": series}

    def _curve(self, buckets: dict[int, Bucket], kind: Kind) -> dict[str, list[float | None]]:
        places = [buckets.get(place) for place in range(self._first, self._last + 1)]
        if kind is Kind.RATE:
            return {"mean": [_short(bucket.total / self._width) if bucket else 0.0 for bucket in places]}
        curve: dict[str, list[float | None]] = {
            "mean": [_short(bucket.total / bucket.weight) if bucket and bucket.weight else None for bucket in places],
            "low": [_short(bucket.low) if bucket else None for bucket in places],
            "high": [_short(bucket.high) if bucket else None for bucket in places],
        }
        return curve if curve["low"] != curve["high"] else {"mean": curve["mean"]}


def _short(value: float) -> float | None:
    """Four digits: finer than any screen. What is not finite has no place on one."""
    return float(f"{value:.4g}") if -inf < value < inf else None
