"""Every alert fires when it should, and none fires in a run that is healthy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from miles_async.events import (
    CollapseRiskChanged,
    Event,
    LearnerRestored,
    ProcessSilent,
    Pulse,
    RouterChanged,
    RunContinued,
    StepEnded,
    StepStarted,
)
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.view import RunView
from miles_async.types import EngineLoad, Group
from tests.sim.engines import Engines
from tests.unit.observability.metrics.alert_scenarios import ASKED, RULES, driven, ended, promtool, scraped, simulated

ALERTS = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
NINE_MINUTES = 540.0


class Elsewhere(Engines):
    """The responses come from somewhere else, such as a tool, so the engines report no tokens."""

    async def loads(self) -> Sequence[EngineLoad]:
        return [EngineLoad(source="e", kv_usage=0.0, queued=0, generated=0, held=0)]


def long_answer(group: Group, rng: random.Random) -> float:
    return rng.uniform(100.0, 420.0)


def until(seconds: float, events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.time < seconds]


def test_the_rules_are_valid() -> None:
    assert promtool("check", "rules", "recording.yml", "alerts.yml") == ""


def test_the_rules_ask_only_for_metrics_that_the_driver_serves() -> None:
    registry = CollectorRegistry()
    MetricsRecorder(registry, RunView())
    families = {family.name for family in registry.collect()}
    suffixes = ("", "_total", "_sum", "_count", "_bucket")
    assert {name for name in ASKED if not any(name.removesuffix(suffix) in families for suffix in suffixes)} == set()


def test_every_alert_fires_exactly_under_its_condition() -> None:
    assert promtool("test", "rules", "alerts_test.yml") == ""
    tested = [case["name"] for case in yaml.safe_load((RULES / "alerts_test.yml").read_text())["tests"]]
    assert sorted(tested) == sorted(f"{rule['alert']} {does}" for rule in ALERTS for does in ("fires", "does not fire"))


@pytest.mark.parametrize("annotation", ["description", "runbook"])
def test_every_alert_says_when_it_fires_and_what_to_do(annotation: str) -> None:
    assert [rule["alert"] for rule in ALERTS if not rule["annotations"].get(annotation, "").endswith(".")] == []


def test_no_alert_fires_in_a_healthy_run(tmp_path: Path) -> None:
    assert scraped(ended(driven(simulated()))).other_alerts(tmp_path) == ""


def test_no_alert_fires_in_a_run_that_starts_for_nine_minutes(tmp_path: Path) -> None:
    assert scraped(ended(driven(simulated(), start_seconds=NINE_MINUTES))).other_alerts(tmp_path) == ""


def test_no_alert_fires_in_a_run_whose_answers_take_minutes(tmp_path: Path) -> None:
    slow = simulated(
        batches=30,
        engine_kind=Elsewhere,
        latency=long_answer,
        train_seconds=62.0,
        custom_generate_function_path="mine.generate",
    )
    assert scraped(ended(driven(slow))).other_alerts(tmp_path) == ""


def test_no_alert_fires_in_a_run_with_a_staleness_limit_of_one(tmp_path: Path) -> None:
    fresh = simulated(
        max_weight_staleness=1, over_sampling_batch_size=16, latency=lambda group, rng: rng.uniform(10.0, 13.0)
    )
    ages = [age for event in fresh if isinstance(event, StepStarted) for age in event.staleness]
    assert fmean(ages) > 0.9
    assert scraped(ended(driven([replace(fresh[0], staleness_limit=1), *fresh[1:]]))).other_alerts(tmp_path) == ""


def test_no_alert_fires_when_a_process_pauses_for_five_seconds(tmp_path: Path) -> None:
    pause = [ProcessSilent(time=200.0 + second, process="engine-0", seconds=second) for second in (2.0, 3.0, 4.0, 5.0)]
    answers = ProcessSilent(time=206.0, process="engine-0", seconds=0.0)
    events = sorted([*driven(simulated()), *pause, answers], key=lambda event: event.time)
    assert scraped(ended(events)).other_alerts(tmp_path) == ""


def troubled() -> list[Event]:
    """A run that was stopped after 400 seconds; a loss was not finite, a collapse was announced, a group was stuck."""
    events = until(400.0, driven(simulated()))
    steps = [index for index, event in enumerate(events) if isinstance(event, StepEnded)]
    step = events[steps[10]]
    assert isinstance(step, StepEnded)
    events[steps[10]] = replace(step, finite=False)
    events.append(CollapseRiskChanged(time=390.0, rollout=20, high=True, why="it fell", knob="lower --lr"))
    (pulse,) = [event for event in events if isinstance(event, Pulse)][-1:]
    events.append(replace(pulse, time=399.0, head_seconds=600.0, blocked=5, idle_seconds=300.0))
    return ended(events, "interrupted")


def rollouts(events: Sequence[Event]) -> int:
    return sum(isinstance(event, StepEnded) for event in events)


def test_no_alert_fires_in_a_run_that_is_resumed_whatever_had_happened_before(tmp_path: Path) -> None:
    before = troubled()
    after = driven(simulated(), start_seconds=NINE_MINUTES, at=4000.0, first_rollout=rollouts(before))
    # What the processes of the earlier driver had reported before they ended arrives late.
    late = [event for event in before if isinstance(event, Pulse)][-1:]
    gone = [RouterChanged(time=399.5, up=False, engines=0, healthy=0), *late]
    cleared = CollapseRiskChanged(time=4000.0, rollout=20, high=False, why="the learner continues", knob="")
    ready = next(index for index, event in enumerate(after) if event.time > 4000.0 + NINE_MINUTES)
    resumed = ended([after[0], cleared, *after[1:ready], *gone, *after[ready:]])
    assert scraped(before, resumed).since(4000.0).other_alerts(tmp_path) == ""


def test_a_run_whose_driver_was_killed_fires_only_that_it_was_and_what_was_undone(tmp_path: Path) -> None:
    before = until(400.0, driven(simulated()))
    done = rollouts(before)
    again = driven(simulated(batches=20), at=500.0, first_rollout=done - 5)
    ready = next(index for index, event in enumerate(again) if isinstance(event, RouterChanged)) + 1
    restored = LearnerRestored(
        time=again[ready].time, rollout=done - 6, kept_version=done - 5, version=done + 1, updates=0, groups=40
    )
    continues = [RunContinued(time=again[ready].time), restored]
    killed = scraped(before, ended([*again[:ready], *continues, *again[ready:]]))
    assert killed.since(500.0).other_alerts(tmp_path, "BatchesUndone", "DriverRestarted") == ""
