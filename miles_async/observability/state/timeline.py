"""Time series in bounded memory.

Time is divided into buckets of equal width. When a series needs more buckets than allowed, neighbouring buckets are
merged, as in a round-robin database. A day of a run therefore takes as much memory as a minute of it. Each bucket keeps
its lowest and highest value, so that a short spike stays visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any


class Kind(StrEnum):
    """How the value of a bucket is computed."""

    MEAN = "mean"
    """The mean of the observations in the bucket."""
    HELD = "held"
    """The time-weighted mean of a value that stays the same until it is set again."""
    RATE = "rate"
    """The sum divided by the width of the bucket in seconds. A rate of seconds is a fraction of time."""


@dataclass(slots=True)
class Bucket:
    weight: float = 0.0
    """Number of observations (MEAN, RATE) or seconds (HELD)."""
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

    def merge(self, other: Bucket) -> None:
        self.weight += other.weight
        self.total += other.total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)


@dataclass(slots=True)
class _Held:
    value: float
    since: float


class Timeline:
    """Named series over one common grid of at most `max_buckets` buckets.

    The grid begins at `began` (wall-clock seconds), and each bucket is `width` seconds wide. A rolling timeline keeps
    its bucket width and discards its oldest buckets. Any other timeline keeps all time and doubles its bucket width
    when it is full.
    """

    def __init__(self, began: float, *, width: float, max_buckets: int, rolling: bool = False) -> None:
        self._began = began
        self._width = width
        self._max_buckets = max_buckets
        self._rolling = rolling
        self._first = 0
        self._last = 0
        self._kinds: dict[str, Kind] = {}
        self._series: dict[str, dict[int, Bucket]] = {}
        self._held: dict[str, _Held] = {}

    def observe(self, name: str, time: float, value: float) -> None:
        """Add one observation of a MEAN series."""
        self._bucket(name, Kind.MEAN, self._index(time)).add(value, 1.0)

    def retract(self, name: str, time: float, value: float) -> None:
        """Take back an observation of a MEAN series. Lowest and highest value of its bucket stay if others remain."""
        index, series = self._index(time), self._series[name]
        series[index].add(value, -1.0)
        if series[index].weight <= 0:
            del series[index]

    def count(self, name: str, time: float, amount: float) -> None:
        """Add `amount` to a RATE series."""
        self._bucket(name, Kind.RATE, self._index(time)).add(amount, 1.0)

    def add_interval(self, name: str, start: float, end: float, fraction: float = 1.0) -> None:
        """Add `fraction` of the seconds from `start` to `end` to a RATE series, each to the bucket it falls into."""
        for index, seconds in self._covered(start, end):
            self._bucket(name, Kind.RATE, index).add(seconds * fraction, 1.0)

    def set_value(self, name: str, time: float, value: float) -> None:
        """Set the value of a HELD series from `time` on."""
        held = self._held.get(name)
        if held is None:
            self._held[name] = _Held(value, time)
        elif held.value == value:
            return
        else:
            self._extend(name, held, time)
            held.value = value
        # A value that is replaced at once has no duration, but may still be the lowest or highest of its bucket.
        self._bucket(name, Kind.HELD, self._index(time)).add(value, 0.0)

    def advance(self, now: float) -> None:
        """Extend all HELD series to `now` with their current values."""
        self._index(now)
        for name, held in self._held.items():
            self._extend(name, held, now)

    def _extend(self, name: str, held: _Held, until: float) -> None:
        if until <= held.since:
            return
        index = self._index(until)
        if self._began + index * self._width <= held.since:
            # Fast path: values change many times per bucket, so both times nearly always fall into the same bucket.
            self._bucket(name, Kind.HELD, index).add(held.value, until - held.since)
        else:
            for covered, seconds in self._covered(held.since, until):
                self._bucket(name, Kind.HELD, covered).add(held.value, seconds)
        held.since = until

    def _index(self, time: float) -> int:
        """Return the index of the bucket that holds `time`, after making room for it."""
        index = max(self._first, int((time - self._began) / self._width))
        if index > self._last:
            self._last = index
            while self._last - self._first >= self._max_buckets:
                self._make_room()
            # Merging buckets halves their indices, so the index computed above may be out of date.
            index = self._last
        return index

    def _make_room(self) -> None:
        if self._rolling:
            first = self._last - self._max_buckets + 1
            discarded = range(self._first, min(first, self._first + self._max_buckets))
            for buckets in self._series.values():
                for index in discarded:
                    buckets.pop(index, None)
            self._first = first
            return
        self._width *= 2
        self._last //= 2
        for name, buckets in self._series.items():
            merged: dict[int, Bucket] = {}
            for index, bucket in buckets.items():
                merged.setdefault(index // 2, Bucket()).merge(bucket)
            self._series[name] = merged

    def _covered(self, start: float, end: float) -> Iterator[tuple[int, float]]:
        """Yield the indices of the buckets between two times, with the seconds that fall into each."""
        last = self._index(end)  # first, because it may merge buckets or discard the oldest
        start = max(start, self._began + self._first * self._width)
        index = self._index(start)
        while index <= last and start < end:
            edge = min(end, self._began + (index + 1) * self._width)
            # Rounding may place `start` at the upper edge of its bucket, in which case nothing falls into the bucket.
            if edge > start:
                yield index, edge - start
            start, index = max(start, edge), index + 1

    def _bucket(self, name: str, kind: Kind, index: int) -> Bucket:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = {}
            self._kinds[name] = kind
        bucket = series.get(index)
        if bucket is None:
            bucket = series[index] = Bucket()
        return bucket

    def dominant_phases(self, prefix: str) -> list[tuple[float, float, str]]:
        """Return which of the RATE series named `prefix…` was largest over time.

        Each element is (start, end, name without the prefix), with times in seconds since `began`. Buckets in which no
        such series has a value are left out.
        """
        names = [name for name in self._series if name.startswith(prefix)]
        phases: list[tuple[float, float, str]] = []
        for index in range(self._first, self._last + 1):
            seconds = {name: self._series[name][index].total for name in names if index in self._series[name]}
            if not seconds:
                continue
            largest = max(seconds, key=lambda name: seconds[name]).removeprefix(prefix)
            start = index * self._width
            if phases and phases[-1][2] == largest and phases[-1][1] == start:
                start = phases.pop()[0]
            phases.append((start, (index + 1) * self._width, largest))
        return phases

    def figures(self) -> dict[str, Any]:
        """Return all series as plain values for JSON.

        `start` (seconds since `began`) and `width` (seconds) describe the grid. `series` maps each name to its `mean`,
        `low` and `high`, lists with one value per bucket. `low` and `high` are left out if they are equal throughout.
        """
        series = {name: self._curve(buckets, self._kinds[name]) for name, buckets in self._series.items()}
        return {"start": self._first * self._width, "width": self._width, "series": series}

    def _curve(self, by_index: dict[int, Bucket], kind: Kind) -> dict[str, list[float | None]]:
        buckets = [by_index.get(index) for index in range(self._first, self._last + 1)]
        if kind is Kind.RATE:
            return {"mean": [_rounded(bucket.total / self._width) if bucket else 0.0 for bucket in buckets]}
        curve: dict[str, list[float | None]] = {
            "mean": [
                _rounded(bucket.total / bucket.weight) if bucket and bucket.weight else None for bucket in buckets
            ],
            "low": [_rounded(bucket.low) if bucket else None for bucket in buckets],
            "high": [_rounded(bucket.high) if bucket else None for bucket in buckets],
        }
        return curve if curve["low"] != curve["high"] else {"mean": curve["mean"]}


def _rounded(value: float) -> float | None:
    """Round to four significant digits, which is finer than any screen; None if the value is not finite."""
    return float(f"{value:.4g}") if -inf < value < inf else None
