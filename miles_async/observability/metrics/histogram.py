"""A Prometheus histogram that costs next to nothing to fill: a dozen are, for every group of a run.

prometheus-client's own takes a lock and searches its buckets one by one. This one is filled from one thread, and the
sums are made when somebody asks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """The observations of one label value."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Bucket bounds with the observations up to each, and the sum of all values."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class Histogram(Collector):
    """Buckets hold values up to and including their bound, as Prometheus' do."""

    def __init__(
        self, name: str, text: str, label: str | None, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._label, self._bounds = name, text, label, tuple(map(float, bounds))
        self._series: dict[str, Series] = {} if label is not None else {"": Series(self._bounds)}
        registry.register(self)

    def labels(self, value: str) -> Series:
        series = self._series.get(value)
        if series is None:
            series = self._series[value] = Series(self._bounds)
        return series

    def observe(self, value: float) -> None:
        """Of a histogram without a label."""
        self._series[""].observe(value)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for value, series in list(self._series.items()):
            buckets, total = series.cumulative()
            family.add_metric([value] if self._label else [], buckets, total)
        yield family
