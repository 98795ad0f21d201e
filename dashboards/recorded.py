"""Converts the events of a finished run to the metrics that Prometheus would have scraped, as OpenMetrics text.

prometheus-client can write OpenMetrics too, but it would hold every sample of the run as an object. This module keeps
one line of text per sample.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.trace.event_log import read_events
from miles_async.observability.view import RunView

MAX_SAMPLES = 3000
"""Most samples per series, enough to plot a day."""
MIN_INTERVAL_SECONDS = 2.0


def write_openmetrics(run: Path, target: Path) -> tuple[float, float]:
    """Write the metrics of the run's driver to `target`, and return when the run began and ended.

    Raises UserError or OSError if the events of the run cannot be read.
    """
    began, ended = span(run)
    interval = max(MIN_INTERVAL_SECONDS, (ended - began) / MAX_SAMPLES)
    registry = CollectorRegistry()
    view = RunView()
    metrics = MetricsRecorder(registry, view)
    families: dict[str, list[str]] = {}
    due = began
    for event in read_events(run / "events.jsonl"):
        # Events of several processes may be slightly out of order, but samples must be in order.
        while event.time >= due:
            metrics.tick(due)
            _sample(registry, run.resolve().name, due, families)
            due += interval
        view.apply(event)
        metrics.observe(event)
    _sample(registry, run.resolve().name, ended, families)
    target.write_text("".join("".join(lines) for lines in families.values()) + "# EOF\n")
    return began, ended


def span(run: Path) -> tuple[float, float]:
    """When the first and the last event of a run happened. Raises UserError or OSError if they cannot be read."""
    times = [event.time for event in read_events(run / "events.jsonl")]
    if not times:
        raise SystemExit(f"{run}/events.jsonl has no events: name the folder of a run that has started")
    return min(times), max(times)


def _sample(registry: CollectorRegistry, run: str, now: float, families: dict[str, list[str]]) -> None:
    """Append the value of every series to the lines of its family. OpenMetrics requires each family in one block."""
    target = {"job": "miles_async", "instance": "recorded", "process": "driver", "run": run}
    for family in registry.collect():
        lines = families.setdefault(family.name, [f"# TYPE {family.name} {family.type}\n"])
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in {**sample.labels, **target}.items())
            lines.append(f"{sample.name}{{{labels}}} {sample.value} {now:.3f}\n")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
