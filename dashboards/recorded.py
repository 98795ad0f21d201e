"""The metrics of a run that has ended, as they were: its events, folded again, sampled, as OpenMetrics text."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from miles_async.observability.diagnosis.verdict import Verdicts
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.trace.event_log import read_events

SAMPLES = 3000
"""Points in time at most: enough to plot a day."""
SHORTEST_SECONDS = 2.0


def write_openmetrics(run: Path, target: Path) -> tuple[float, float]:
    """Write what Prometheus would have scraped from the run's driver; returns when it began and ended."""
    began, ended = _span(run)
    every = max(SHORTEST_SECONDS, (ended - began) / SAMPLES)
    registry = CollectorRegistry()
    metrics, verdicts = MetricsRecorder(registry), Verdicts()
    families: dict[str, list[str]] = {}
    due = began
    for event in read_events(run / "events.jsonl"):
        # Events of several processes arrive a little out of order; samples may not.
        while event.time >= due:
            verdicts.tick(due)
            metrics.set_verdict(verdicts.finding.verdict, verdicts.trainer_seconds)
            metrics.tick(due)
            _sample(registry, run.resolve().name, due, families)
            due += every
        metrics.observe(event)
        verdicts.observe(event)
    _sample(registry, run.resolve().name, ended, families)
    target.write_text("".join("".join(lines) for lines in families.values()) + "# EOF\n")
    return began, ended


def _span(run: Path) -> tuple[float, float]:
    times = [event.time for event in read_events(run / "events.jsonl")]
    if not times:
        raise SystemExit(f"{run}/events.jsonl holds no event: name the folder of a run")
    return min(times), max(times)


def _sample(registry: CollectorRegistry, run: str, now: float, families: dict[str, list[str]]) -> None:
    """Append every series' value to its family's lines: OpenMetrics wants a family in one piece."""
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
