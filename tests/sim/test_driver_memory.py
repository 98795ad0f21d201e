"""The memory of the driver does not grow with the length of a run."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from miles_async.events import (
    AdmissionBlocked,
    BatchDrained,
    EngineBusy,
    Evaluated,
    Event,
    GroupGenerated,
    GroupMoved,
    PublishEnded,
    PublishStarted,
    Pulse,
    QueueChanged,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
)
from miles_async.observability.console.stall_report import StallReport
from miles_async.observability.diagnosis.collapse import CollapseDetector
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.state import charts, learner, publishes, tokens
from miles_async.observability.summary import summarize
from miles_async.observability.view import RunView
from tests.unit.example_events import RUN

METRICS = ("ess", "grad_norm", *(f"metric_{i}" for i in range(6)))
STATES = (None, "fed", "in_flight", "finished", "queued", "leased", "trained", "published")
STEP_SECONDS = 4.0


def rollout(number: int) -> Iterator[Event]:
    """The events of one batch with one group: generation, step and publish."""
    start = 100.0 + STEP_SECONDS * number
    counts = {"in_flight": number % 7, "queued": number % 5}
    yield TrainerPhaseChanged(time=start, to="batch")
    for before, after in pairwise(STATES):
        assert after is not None
        yield GroupMoved(
            time=start + 0.01, sequence=number, feed_index=f"sample_0_{number}", attempt=0, before=before, after=after,
            reason=None, counts=counts,
        )  # fmt: skip
        if after == "in_flight":
            yield GroupGenerated(
                time=start + 0.01, sequence=number, generation_seconds=0.005, reward_seconds=0.005,
                versions=(number, number), response_tokens=100, reward=0.5, truncated=0,
            )  # fmt: skip
        if after == "leased":
            yield BatchDrained(time=start + 0.02, rollout=number, depth=3, waited=0.5, recycled=0)
            yield StepStarted(time=start + 0.02, rollout=number, version=number, staleness=[0], groups=[number])
            yield StepEnded(
                time=start + 0.03, rollout=number, seconds=0.01, tokens=100, finite=True,
                reward=0.5, response_length=50.0, metrics={name: float(number) for name in METRICS},
            )  # fmt: skip
    yield PublishStarted(time=start + 0.04, version=number + 1, queue=3)
    yield PublishEnded(
        time=start + 0.05, version=number + 1, live=True, staged_seconds=0.1, paused_seconds=0.1, stopping_seconds=0.0,
        write_seconds=0.1, resuming_seconds=0.0, bytes=1000, queue=3, fenced=[],
    )  # fmt: skip
    yield AdmissionBlocked(time=start + 0.06, cause="slots", seconds=0.5)
    yield QueueChanged(time=start + 0.06, depth=number % 5, blocked=0)
    for second in (0.5, 1.0, 1.5):
        yield EngineBusy(time=start + second, busy=start + second - 100.0, in_flight=number % 3)
        yield Pulse(
            time=start + second, generating=1, rewarding=0, oldest=number, oldest_seconds=1.0, waits_for=None,
            waits_seconds=0.0, head=number, head_state="in_flight", head_seconds=1.0, queue=3, blocked=0, collected=0,
            wanted=1, trainer_version=number, live_version=number, idle_seconds=0.0,
            warn_seconds=30.0,
        )  # fmt: skip
    if number % 100 == 0:
        yield Evaluated(
            time=start + 1.8, name="heldout", rollout=number, versions=(number, number), accuracy=0.5, reward=0.5,
            problems=10, seconds=9.0, truncated=0.0,
        )  # fmt: skip


def test_memory_does_not_grow_with_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishes, "MAX_VALUES", 64)
    monkeypatch.setattr(learner, "REMEMBERED_STEPS", 64)
    monkeypatch.setattr(tokens, "MAX_RECENT_SECONDS", 64)
    for limit in ("WHOLE_RUN_BUCKETS", "RECENT_BUCKETS", "MAX_BATCHES"):
        monkeypatch.setattr(charts, limit, 8)
    view = RunView()
    metrics, collapse, stall = MetricsRecorder(CollectorRegistry(), view), CollapseDetector(), StallReport(view, 30.0)
    sizes = []
    tracemalloc.start()
    try:
        for number in range(769):
            if number in (256, 768):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            for event in (RUN, *rollout(number)) if number == 0 else rollout(number):
                view.apply(event)
                metrics.observe(event)
                collapse.observe(event)
                stall.observe(event, event.time)
            if number % 32 == 0:
                metrics.tick(100.0 + STEP_SECONDS * number)
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 100 * 512, "each step keeps memory; a week may have 300,000 steps"


@pytest.mark.parametrize("rollouts", [3, 5_000])
def test_the_figures_of_a_long_run_are_those_of_a_short_one(rollouts: int) -> None:
    view = RunView()
    view.apply(RUN)
    for number in range(rollouts):
        for event in rollout(number):
            view.apply(event)
    figures = summarize(view)
    assert figures["rollouts"] == figures["versions"] == rollouts
    assert figures["publish_bytes"] == 1000 * rollouts
    assert figures["publish_ms_median"] == pytest.approx(200)
    assert figures["pause_ms_max"] == pytest.approx(100)
    assert figures["training_seconds"] == pytest.approx(STEP_SECONDS * (rollouts - 1) + 0.01)
    assert figures["engine_idle_share"] == pytest.approx(0)
    assert figures["staleness_histogram"] == {"0": rollouts}
