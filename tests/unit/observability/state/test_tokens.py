"""Tokens that were generated and are not trained, by reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from miles_async.events import Event, GroupGenerated, SampleDiscarded
from miles_async.observability.state.tokens import Tokens
from miles_async.observability.view import RunView
from tests.unit.example_events import RUN, moved
from tests.unit.observability.metrics.test_observability_metrics import pulse


def generated(time: float, sequence: int, seconds: float, tokens: int) -> GroupGenerated:
    return GroupGenerated(
        time=time,
        sequence=sequence,
        generation_seconds=seconds,
        reward_seconds=0.0,
        versions=(0, 0),
        response_tokens=tokens,
        reward=1.0,
        truncated=0,
    )


def counted(*events: Event, longest_response: int = 500) -> Tokens:
    view = RunView()
    for event in (replace(RUN, longest_response=longest_response), *events):
        view.apply(event)
    return view.tokens


def test_tokens_of_groups_that_were_generated_before_they_were_dropped_are_counted_once() -> None:
    waste = counted(
        generated(1.0, 0, 1.0, 60),
        generated(1.0, 1, 1.0, 30),
        moved(1, "queued", "dropped", "stale", time=2.0, tokens=30),
        moved(2, "in_flight", "dropped", "head_deadline", time=2.0, tokens=10),
        SampleDiscarded(time=3.0, sequence=3, sample=9, reason="failed", tokens=20, error="no tools"),
    )
    assert waste.generated == 60 + 30 + 10 + 20
    assert waste.share == pytest.approx(60 / 120)
    assert waste.main_reason == "stale"


def test_groups_that_a_filter_rejects_are_wasted_but_not_avoidable() -> None:
    waste = counted(generated(1.0, 0, 1.0, 80), moved(0, "in_flight", "dropped", "filtered", time=1.0, tokens=80))
    assert (waste.share, waste.avoidable, waste.main_reason) == (1.0, 0.0, None)


def test_tokens_that_are_generated_twice_after_the_loss_of_a_rollout_worker_are_estimated_from_the_time() -> None:
    waste = counted(
        generated(10.0, 0, 4.0, 200),
        moved(1, "fed", "in_flight", time=12.0),
        pulse(15.0, generating=1),
        pulse(19.0),  # of the next rollout worker
        moved(1, "in_flight", "dropped", "worker_lost", time=19.0),
        moved(2, "fed", "dropped", "worker_lost", time=19.0),
    )
    assert waste.by_reason == {"worker_lost": 3 * 50}


def test_no_group_loses_more_tokens_than_it_can_have() -> None:
    waste = counted(
        generated(10.0, 0, 1.0, 20),
        moved(1, "fed", "in_flight", time=12.0),
        pulse(1000.0, generating=1),
        moved(1, "in_flight", "dropped", "worker_lost", time=1001.0),
        longest_response=10,
    )
    assert waste.by_reason == {"worker_lost": RUN.samples_per_group * 10}
