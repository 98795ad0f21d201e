"""What a run shows after its driver, rollout worker or learner was lost and replaced."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from miles_async.events import (
    ClusterReady,
    EngineBusy,
    Event,
    LearnerRestored,
    PublishStarted,
    RunContinued,
    RunEnded,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
)
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.page.status import status
from miles_async.observability.summary import summarize, summary_text
from miles_async.observability.view import RunView
from tests.unit.example_events import PUBLISHED, RUN, moved
from tests.unit.observability.metrics.test_observability_metrics import pulse


def ready(time: float, warm_start: float, *, cached: bool) -> ClusterReady:
    return ClusterReady(time=time, weight_transfer="p2p", warm_start_seconds=warm_start, warm_start_cached=cached)


def phase(time: float, to: str = "batch") -> TrainerPhaseChanged:
    return TrainerPhaseChanged(time=time, to=to)


def started(rollout: int, time: float, ages: list[int]) -> StepStarted:
    return StepStarted(time=time, rollout=rollout, version=rollout, staleness=ages, groups=list(range(len(ages))))


def step(rollout: int, begin: float, end: float, ages: list[int], *, reward: float = 0.5) -> list[Event]:
    """A training step, after which the learner waits for the next batch."""
    return [
        phase(begin, "step"),
        started(rollout, begin, ages),
        StepEnded(
            time=end,
            rollout=rollout,
            seconds=end - begin,
            tokens=1000,
            finite=True,
            reward=reward,
            response_length=4.0,
            metrics={},
        ),
        phase(end),
    ]


RESTORED = LearnerRestored(time=175.0, rollout=0, kept_version=1, version=3, updates=0, groups=4)
# The driver is killed at 118 s, after two steps, and the next one trains the second step again. Of the 80 seconds from
# the first step to the last one, 60 have no rollout worker. The learner trains for 2 + 2 + 2 of the other 20 seconds.
KILLED: list[Event] = [
    RUN,
    ready(104.0, 43.4, cached=False),
    phase(105.0),
    EngineBusy(time=110.0, busy=5.0, in_flight=3),
    *step(0, 110.0, 112.0, [0, 0]),
    *step(1, 114.0, 116.0, [1, 1], reward=0.0),
    EngineBusy(time=118.0, busy=13.0, in_flight=3),
    pulse(118.0, wanted=2),
    PublishStarted(time=118.0, version=2, queue=0),
]
RESUMED: list[Event] = [
    replace(RUN, time=158.0),
    ready(170.0, 0.0, cached=True),
    RunContinued(time=174.0),
    RESTORED,
    phase(178.0),
    EngineBusy(time=188.0, busy=6.0, in_flight=0),
    *step(1, 188.0, 190.0, [0, 2], reward=1.0),
    EngineBusy(time=190.0, busy=6.0, in_flight=0),
]


def view_of(*events: Event) -> RunView:
    view = RunView()
    for event in events:
        view.apply(event)
    return view


def test_rates_count_what_was_trained_and_kept_and_the_gross_rates_also_what_was_undone() -> None:
    figures = summarize(view_of(*KILLED, *RESUMED))
    assert figures["training_seconds"] == 80
    assert (figures["groups_per_second"], figures["groups_per_second_gross"]) == (4 / 80, 6 / 80)
    assert (figures["tokens_per_second"], figures["tokens_per_second_gross"]) == (2000 / 80, 3000 / 80)
    assert (figures["undone_batches"], figures["undone_groups"], figures["undone_tokens"]) == (1, 2, 1000)
    assert figures["rollouts"] == 2


def test_the_text_of_the_summary_says_which_rate_is_which() -> None:
    text = summary_text(view_of(*KILLED, *RESUMED))
    assert "prompt and response tokens/s; with the 1 undone batches: 0.1 groups/s, 38 tokens/s" in text
    assert "driver: 1; without a rollout worker for no driver: 40.0 s, driver start: 20.0 s" in text
    assert "undone" not in summary_text(view_of(*KILLED))


def test_ages_and_rewards_are_those_of_the_groups_that_were_kept() -> None:
    figures = summarize(view_of(*KILLED, *RESUMED))
    assert figures["staleness_histogram"] == {"0": 3, "2": 1}
    assert figures["rewards"] == [0.5, 1.0]
    assert (figures["reward_first"], figures["reward_last"], figures["reward_batches"]) == (0.5, 1.0, 1)


def test_a_rollout_that_is_trained_again_undoes_its_first_training_without_an_event_of_the_learner() -> None:
    without = [event for event in RESUMED if not isinstance(event, LearnerRestored)]
    assert view_of(*KILLED, *without).steps.undone == view_of(*KILLED, *RESUMED).steps.undone


def test_time_without_a_driver_is_neither_idle_nor_the_time_of_a_verdict() -> None:
    view = view_of(*KILLED, *RESUMED, RunEnded(time=190.0, reason="done"))
    figures = summarize(view)
    assert figures["interrupted_seconds"] == {"no_driver": 40, "driver_start": 20}
    assert figures["restarts"] == {"driver": 1}
    assert figures["learner_idle_share"] == 1 - 6 / 20
    assert sum(figures["verdict_seconds"].values()) == 118 - 105 + 190 - 178
    assert sum(view.learner.seconds.values()) == 118 - 105 + 190 - 178


def test_a_counter_of_busy_seconds_that_begins_again_is_added_and_not_subtracted() -> None:
    figures = summarize(view_of(*KILLED, *RESUMED))
    assert figures["engine_idle_share"] == 1 - (8 + 6) / 20
    view = view_of(*KILLED, EngineBusy(time=122.0, busy=1.0, in_flight=0))
    assert view.engine_idle_seconds(122.0) == (122 - 110) - (8 + 1)


def test_busy_seconds_that_a_rollout_worker_reports_while_it_restores_the_run_count_once() -> None:
    early = EngineBusy(time=177.0, busy=0.0, in_flight=0)
    late = [EngineBusy(time=177.5, busy=0.5, in_flight=1)]
    before, after = RESUMED[:4], RESUMED[4:]
    whole = summarize(view_of(*KILLED, *RESUMED))["engine_idle_share"]
    assert summarize(view_of(*KILLED, *before, early, *after))["engine_idle_share"] == whole
    assert view_of(*KILLED, *before, *late, *after).engine_use.busy_seconds(190.0) == 8 + 6


def test_the_metrics_have_the_idle_seconds_of_the_summary() -> None:
    view, registry = RunView(), CollectorRegistry()
    metrics = MetricsRecorder(registry, view)
    for event in (*KILLED, *RESUMED):
        view.apply(event)
        metrics.observe(event)
        metrics.tick(event.time)
    figures = summarize(view)
    served = 80 - 60
    for who, share in {"learner": figures["learner_idle_share"], "engine": figures["engine_idle_share"]}.items():
        assert share is not None
        assert registry.get_sample_value(f"miles_async_{who}_idle_seconds_total") == pytest.approx(share * served)
    assert registry.get_sample_value("miles_async_warm_start_seconds") == 43.4


def test_reports_of_the_lost_rollout_worker_that_arrive_late_count_at_their_own_time() -> None:
    start, *rest = RESUMED
    late = [phase(120.0, "step"), started(2, 120.0, [1]), pulse(121.0)]
    view = view_of(*KILLED, start, *late, *rest)
    assert view.uptime.seconds == {"no_driver": 37, "driver_start": 20}
    assert view.steps.unfinished_seconds == 1.0
    assert summarize(view)["lost_learner_seconds"] == 2.0 + 1.0


def test_a_step_that_the_learner_ended_without_a_rollout_worker_is_not_lost() -> None:
    begun, ended = [phase(120.0, "step"), started(2, 120.0, [1]), pulse(121.0)], step(2, 124.0, 127.0, [1])[2]
    view = view_of(*KILLED, *begun, RunContinued(time=126.0), ended, phase(128.0), *step(3, 128.0, 130.0, [0]))
    assert view.steps.lost_seconds == 0
    # Up to 130 s the run is served for 11 + 2 seconds, in which steps take 2 + 2 + 1 + 2 seconds.
    assert view.learner_idle_seconds(130.0) == 13 - 7


def test_the_warm_start_is_that_of_the_start_that_made_it() -> None:
    assert summarize(view_of(*KILLED, *RESUMED))["warm_start_seconds"] == 43.4
    assert status(view_of(*KILLED, *RESUMED), 190.0)["training_began"] == 4.0


def test_a_rollout_worker_and_a_learner_that_are_replaced_are_told_apart() -> None:
    worker = [RunContinued(time=125.0), phase(128.0), *step(2, 130.0, 132.0, [0])]
    learner = [RunContinued(time=125.0), replace(RESTORED, time=126.0, rollout=1), phase(128.0)]
    assert view_of(*KILLED, *worker).uptime.seconds == {"rollout_worker": 10}
    assert view_of(*KILLED, *worker).uptime.restarts == {"rollout_worker": 1}
    figures = summarize(view_of(*KILLED, *learner))
    assert (figures["restarts"], figures["interrupted_seconds"]) == ({"learner": 1}, {"learner": 10})


def test_a_publish_that_a_driver_did_not_end_is_over_when_the_next_one_continues() -> None:
    ended = replace(PUBLISHED, time=179.0, version=3)
    assert view_of(*KILLED).publishes.running is not None
    view = view_of(*KILLED, *RESUMED)
    assert view.publishes.running is None
    assert "publish-bound" not in summarize(view)["verdict_seconds"]
    assert view_of(*KILLED, *RESUMED, ended).publishes.version == 3


def test_the_charts_show_an_interruption_and_no_negative_use_of_the_engines() -> None:
    figures = view_of(*KILLED, *RESUMED).charts.figures("whole", 190.0)
    series, width = figures["series"], figures["width"]
    assert sum(series["trainer:interrupted"]["mean"]) * width == 60
    assert min(value for value in series["engines_busy"]["mean"] if value is not None) >= 0


def test_groups_that_are_trained_again_are_published_once() -> None:
    once = [moved(0, "trained", "published"), moved(0, "published", "queued"), moved(0, "trained", "published")]
    assert view_of(RUN, *once).groups.outcomes == {"published": 1}
