"""Runs whose metrics the alerts are tested on: what Prometheus would have scraped from their drivers."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from dashboards.build import FOLDER
from dashboards.prometheus import binary
from miles_async.events import (
    BatchDrained,
    ClusterReady,
    EngineBusy,
    EngineChanged,
    Event,
    ProcessSilent,
    RouterChanged,
    RunEnded,
    RunStarted,
    StepEnded,
    StepStarted,
)
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.view import RunView
from tests.configuration import run_config
from tests.sim.engines import Engines, Latency
from tests.sim.world import World

RULES = FOLDER.parent / "rules"
SCRAPE_SECONDS = 5
TARGET = {"run": "r", "instance": "i", "process": "driver", "job": "miles_async"}
_TEXTS = [(RULES / name).read_text() for name in ("recording.yml", "alerts.yml")]
ASKED = {metric for text in _TEXTS for metric in re.findall(r"\bmiles_async_\w+", text)}
"""The metrics that the rules ask for."""
START_SECONDS = 30.0
PROCESSES = ("learner-0", "engine-0", "router", "rollout")


class Scrapes:
    """The samples of every series of a run, one per `SCRAPE_SECONDS` from time 0 on."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.count = 0

    def scrape(self, registry: CollectorRegistry | None) -> None:
        """Append a sample to every series. Without a registry, no driver answers."""
        samples = {} if registry is None else {_name("up", {}): "1"} | _samples_of(registry)
        for series in self.values.keys() | samples.keys():
            values = self.values.setdefault(series, ["_"] * self.count)
            values.append(samples.get(series, "_"))
        self.count += 1

    def since(self, seconds: float) -> Scrapes:
        """The samples from then on, as if Prometheus had been started then."""
        first = int(seconds // SCRAPE_SECONDS)
        later = Scrapes()
        later.values = {series: values[first:] for series, values in self.values.items()}
        later.count = self.count - first
        return later

    def other_alerts(self, folder: Path, *expected: str) -> str:
        """Return what promtool prints if other alerts than the expected ones have fired; empty if not."""
        test = {
            "interval": f"{SCRAPE_SECONDS}s",
            "input_series": [
                {"series": series, "values": " ".join(values)} for series, values in sorted(self.values.items())
            ],
            "promql_expr_test": [
                {
                    "expr": 'max by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1d]))',
                    "eval_time": f"{self.count * SCRAPE_SECONDS}s",
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in expected],
                }
            ],
        }
        file = folder / "test.yml"
        file.write_text(
            yaml.safe_dump(
                {
                    "rule_files": [str(RULES / "recording.yml"), str(RULES / "alerts.yml")],
                    "evaluation_interval": f"{SCRAPE_SECONDS}s",
                    "tests": [test],
                }
            )
        )
        return promtool("test", "rules", str(file))


def promtool(*arguments: str) -> str:
    """Run promtool in the folder of the rules. Returns its output if it fails, else nothing."""
    ended = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, check=False, cwd=RULES)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def scraped(*drivers: Sequence[Event]) -> Scrapes:
    """The metrics of a run that these drivers continued, one after the other. Times are in seconds from 0 on."""
    scrapes, earlier = Scrapes(), list[Event]()
    for events in drivers:
        registry, view = CollectorRegistry(), RunView()
        metrics = MetricsRecorder(registry, view)

        def observe(event: Event, view: RunView = view, metrics: MetricsRecorder = metrics) -> None:
            view.apply(event)
            metrics.observe(event)

        for event in earlier:
            observe(event)
        while scrapes.count * SCRAPE_SECONDS < events[0].time:
            scrapes.scrape(None)
        for event in events:
            while event.time > scrapes.count * SCRAPE_SECONDS:
                metrics.tick(scrapes.count * SCRAPE_SECONDS)
                scrapes.scrape(registry)
            observe(event)
        earlier += events
    return scrapes


def driven(
    events: Iterable[Event], *, start_seconds: float = START_SECONDS, at: float = 0.0, first_rollout: int = 0
) -> list[Event]:
    """The events that a driver passes on: its own, and those of a simulated rollout worker that it has started.

    The driver starts at `at`, and the rollout worker is ready `start_seconds` later and trains `first_rollout` first.
    """
    first, *simulated = events
    assert isinstance(first, RunStarted)
    ready = at + start_seconds
    shift = ready - first.time
    return [
        replace(first, time=at, run="r"),
        *(ProcessSilent(time=at + 1, process=process, seconds=0.0) for process in PROCESSES),
        ClusterReady(time=ready, weight_transfer="p2p", warm_start_seconds=0.0, warm_start_cached=True),
        EngineChanged(time=ready, engine="engine-0", state="routed", version=None, reason=None),
        RouterChanged(time=ready, up=True, engines=1, healthy=1),
        *(_moved(event, shift, first_rollout) for event in simulated),
    ]


def _moved(event: Event, seconds: float, rollouts: int) -> Event:
    if isinstance(event, StepStarted | StepEnded | BatchDrained):
        return replace(event, time=event.time + seconds, rollout=event.rollout + rollouts)
    return replace(event, time=event.time + seconds)


def simulated(
    *,
    batches: int = 40,
    latency: Latency = lambda group, rng: rng.uniform(20.0, 100.0),
    train_seconds: float = 14.0,
    engine_kind: type[Engines] = Engines,
    **settings: Any,
) -> list[Event]:
    """The events of the rollout worker of a run in balance: its learner seldom waits, and neither do its engines."""
    sizes = {"rollout_batch_size": 8, "over_sampling_batch_size": 32, "n_samples_per_prompt": 1}
    config = run_config(num_rollout=batches, **sizes | {"max_weight_staleness": 8} | settings)
    played = World(config=config, latency=latency, train_seconds=train_seconds, engine_kind=engine_kind).run()
    return list(_with_busy_seconds(played.trace.events))


def _with_busy_seconds(events: Iterable[Event]) -> Iterator[Event]:
    """The simulated engines do not count the seconds in which they have requests."""
    busy, before = 0.0, EngineBusy(time=0.0, busy=0.0, in_flight=0)
    for event in events:
        if isinstance(event, EngineBusy):
            busy += (event.time - before.time) * (before.in_flight > 0)
            before = event = replace(event, busy=busy)
        yield event


def ended(events: Sequence[Event], reason: str = "done") -> list[Event]:
    return [*events, RunEnded(time=events[-1].time, reason=reason)]


def _samples_of(registry: CollectorRegistry) -> dict[str, str]:
    return {
        _name(sample.name, sample.labels): "NaN" if math.isnan(sample.value) else repr(sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name in ASKED
    }


def _name(name: str, labels: dict[str, str]) -> str:
    pairs = (f'{label}="{value}"' for label, value in {**labels, **TARGET}.items())
    return f"{name}{{{', '.join(pairs)}}}"
