"""Tokens that were generated and are not trained, by reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from miles_async.events import Event, GroupGenerated, RunEnded, SampleDiscarded, SamplesRemoved, StepStarted
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
    assert (waste.share, waste.main_reason, waste.recent(0.0)) == (1.0, None, (0.0, None))


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


@pytest.mark.parametrize("reason", ["engine_lost", "router_lost"])
def test_tokens_that_were_lost_with_engines_and_routers_are_estimated_like_those_of_rollout_workers(
    reason: str,
) -> None:
    lost = replace(moved(1, "in_flight", "dropped", reason, time=16.0), kept_tokens=40)
    waste = counted(
        generated(10.0, 0, 4.0, 200), moved(1, "fed", "in_flight", time=12.0), pulse(15.0, generating=1), lost
    )
    assert waste.by_reason == {reason: 3 * 50 - 40}
    assert waste.lost_at_most == RUN.samples_per_group * 500 - 40


def started(rollout: int, time: float) -> StepStarted:
    return StepStarted(time=time, rollout=rollout, version=0, staleness=[0], groups=[0])


ABORTED = [moved(1, "fed", "in_flight", time=2.0), moved(1, "in_flight", "dropped", "aborted", time=4.0, tokens=10)]


def test_tokens_that_are_aborted_at_the_end_of_a_batch_are_wasted_and_those_at_the_end_of_a_run_are_left_over() -> None:
    ended = RunEnded(time=9.0, reason="done")
    within = counted(generated(1.0, 0, 1.0, 90), *ABORTED, started(1, 5.0), ended)
    assert (within.by_reason, within.main_reason) == ({"aborted": 10}, "aborted")
    at_end = counted(generated(1.0, 0, 1.0, 90), started(1, 3.0), *ABORTED, ended)
    assert (at_end.by_reason, at_end.main_reason) == ({"leftover": 10}, None)
    assert at_end.generated == within.generated == 100


def test_groups_that_were_not_trained_when_the_run_ended_are_left_over_until_a_resumed_run_trains_them() -> None:
    run = [
        moved(0, None, "fed"),
        moved(0, "fed", "in_flight"),
        generated(3.0, 0, 1.0, 90),
        moved(0, "in_flight", "finished"),
        RunEnded(time=9.0, reason="interrupted"),
    ]
    assert counted(*run).share == 1.0
    resumed = counted(*run, replace(RUN, time=20.0), moved(0, "finished", "queued", time=30.0))
    assert (resumed.by_reason.total(), resumed.generated) == (0, 90)


def test_removed_samples_are_wasted_once_even_if_their_batch_is_trained_again() -> None:
    removed = SamplesRemoved(time=5.0, rollout=3, samples=1, tokens=20)
    waste = counted(generated(1.0, 0, 1.0, 90), removed, replace(removed, time=8.0))
    assert (waste.by_reason, waste.main_reason) == ({"removed": 20}, None)


def test_waste_of_long_ago_is_not_recent() -> None:
    waste = counted(
        moved(1, "in_flight", "dropped", "head_deadline", time=100.0, tokens=900),
        generated(200.0, 2, 1.0, 75),
        moved(3, "in_flight", "dropped", "failed", time=201.0, tokens=25),
    )
    assert waste.recent(since=150.0) == (0.25, "failed")
    assert waste.recent(since=99.0) == (0.925, "head_deadline")
    assert waste.main_reason == "head_deadline"
