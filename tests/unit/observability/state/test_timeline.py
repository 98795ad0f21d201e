"""Series over time in bounded memory, as the page and the report draw them."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from miles_async.events import (
    EngineChanged,
    Evaluated,
    GroupFiltered,
    ProcessSilent,
    Pulse,
    QueueChanged,
    RouterChanged,
    RunEnded,
    StepEnded,
    StepStarted,
    TrainerPhaseChanged,
    WriteFailed,
    encode_json,
)
from miles_async.observability.page.status import SLOTS_SHOWN, status
from miles_async.observability.state.timeline import Timeline
from miles_async.observability.view import RunView
from tests.unit.example_events import PUBLISHED, RUN, moved


def means(timeline: Timeline, name: str) -> list[float | None]:
    return timeline.figures()["series"][name]["mean"]


def test_a_gauge_is_averaged_over_time_and_its_extremes_are_kept() -> None:
    timeline = Timeline(0.0, width=1.0, max_buckets=8)
    timeline.set_value("queue", 0.0, 10)
    timeline.set_value("queue", 0.75, 0)
    timeline.set_value("queue", 0.75, 30)
    timeline.advance(2.0)
    series = timeline.figures()["series"]["queue"]
    assert series["mean"][:2] == [15.0, 30.0]
    assert (series["low"][0], series["high"][0]) == (0.0, 30.0)


def test_durations_become_fractions_of_each_bucket() -> None:
    timeline = Timeline(100.0, width=2.0, max_buckets=8)
    timeline.add_interval("busy", 101.0, 105.0)
    assert means(timeline, "busy") == [0.5, 1.0, 0.5]


def test_a_full_timeline_merges_neighbours_and_loses_no_extreme_and_no_sum() -> None:
    timeline = Timeline(0.0, width=1.0, max_buckets=8)
    for second in range(1000):
        timeline.observe("reward", second, 1.0 if second == 3 else 0.5)
        timeline.count("trained", second, 2)
    figures = timeline.figures()
    assert figures["width"] == 128.0
    assert len(figures["series"]["reward"]["mean"]) == 8
    assert figures["series"]["reward"]["high"][0] == 1.0
    assert sum(figures["series"]["trained"]["mean"]) * 128 == pytest.approx(2000, rel=1e-3)


def test_a_rolling_timeline_forgets_the_oldest_and_keeps_its_width() -> None:
    timeline = Timeline(0.0, width=1.0, max_buckets=10, rolling=True)
    for second in range(1000):
        timeline.observe("reward", second, second)
    figures = timeline.figures()
    assert (figures["start"], figures["width"]) == (990.0, 1.0)
    assert figures["series"]["reward"]["mean"] == list(range(990, 1000))


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    timeline = Timeline(0.0, width=1.0, max_buckets=4)
    timeline.observe("loss", 0.0, float("nan"))
    timeline.observe("loss", 1.0, float("inf"))
    timeline.observe("loss", 2.0, 7.0)
    assert means(timeline, "loss") == [None, None, 7.0]


def test_the_trainers_time_is_counted_up_to_the_last_report() -> None:
    view = RunView()
    view.apply(RUN)
    for time, phase in ((100.0, "batch"), (101.0, "step"), (104.0, "step")):
        view.apply(TrainerPhaseChanged(time=time, to=phase))
    series = view.charts.figures("whole", 106.0)["series"]
    assert series["trainer:batch"]["mean"][:2] == [1.0, 1.0]
    assert sum(series["trainer:step"]["mean"]) * 0.5 == pytest.approx(3.0)


def test_groups_of_a_step_that_was_not_finite_are_not_drawn_as_trained() -> None:
    view = RunView()
    view.apply(RUN)
    for finite in (True, False):
        view.apply(StepStarted(time=100.0, rollout=0, version=0, staleness=[0, 1, 1, 2], groups=[0, 1, 2, 3]))
        view.apply(
            StepEnded(
                time=100.2,
                rollout=0,
                seconds=0.2,
                tokens=9,
                finite=finite,
                reward=0.5,
                response_length=3.0,
                metrics={"loss": 0.1},
            )
        )
    series = view.charts.figures("recent", 100.5)["series"]
    assert series["trained"]["mean"] == [4.0]
    assert (series["staleness"]["low"], series["staleness"]["high"]) == ([0.0], [2.0])
    assert series["step:loss"]["mean"] == [0.1]


def test_a_phase_has_the_verdict_of_most_of_its_time() -> None:
    view = RunView()
    view.apply(RUN)
    view.charts.account("batch", "rollout-bound", 100.0, 103.0)
    view.charts.account("batch", "balanced", 103.0, 103.1)
    view.charts.account("step", "trainer-bound", 103.1, 105.0)
    assert view.charts.verdicts(105.0) == [(0.0, 3.0, "rollout-bound"), (3.0, 5.0, "trainer-bound")]


def test_the_snapshot_lists_live_groups_oldest_first_and_marks_the_head() -> None:
    view = RunView()
    view.apply(RUN)
    for sequence in range(3):
        view.apply(moved(sequence, None, "fed"))
    for before, after in (("fed", "in_flight"), ("in_flight", "finished"), ("finished", "queued")):
        view.apply(moved(0, before, after, time=104.0))
    view.apply(moved(2, "fed", "dropped", "stale"))
    figures = status(view, 106.0)
    assert figures["slots"]["live"] == [[0, "queued", 2.0, 0, "sample_0_0"], [1, "fed", 5.0, 0, "sample_0_1"]]
    assert figures["slots"]["head"] == 1
    assert figures["outcomes"] == {"stale": 1}
    assert figures["fed"] == 3


def test_live_groups_beyond_the_limit_are_counted_and_not_listed() -> None:
    view = RunView()
    view.apply(RUN)
    for sequence in range(SLOTS_SHOWN + 7):
        view.apply(moved(sequence, None, "fed"))
    slots = status(view, 102.0)["slots"]
    assert (len(slots["live"]), slots["counts"]) == (SLOTS_SHOWN, {"fed": SLOTS_SHOWN + 7})


def test_the_snapshot_shows_the_version_of_each_engine_and_a_fenced_engine_stays_behind() -> None:
    view = RunView()
    for name in ("engine-0", "engine-1"):
        view.apply(EngineChanged(time=100.0, engine=name, state="routed", version=0, reason=None))
    publish = replace(PUBLISHED, fenced=["engine-1"])
    view.apply(publish)
    view.apply(ProcessSilent(time=103.0, process="engine-1", seconds=2.0))
    figures = status(view, 104.0)
    assert [(engine.engine, engine.state, engine.version) for engine in figures["engines"]] == [
        ("engine-0", "routed", 5),
        ("engine-1", "fenced", None),
    ]
    assert figures["silent"] == {"engine-1": 2.0}
    view.apply(ProcessSilent(time=105.0, process="engine-1", seconds=0.0))
    assert status(view, 106.0)["silent"] == {}


def test_the_router_and_failed_writes_are_logged() -> None:
    view = RunView()
    view.apply(RUN)
    view.apply(RouterChanged(time=101.0, up=True, engines=2, healthy=1))
    failed = WriteFailed(time=102.0, version=4, engine="engine-1", error="timed out", then="fence", transport=None)
    view.apply(failed)
    figures = status(view, 103.0)
    assert (figures["router"]["engines"], figures["router"]["healthy"]) == (2, 1)
    assert figures["notices"] == [{"at": 2.0, "text": "writing version 4 to engine-1 failed (timed out): fence"}]


def test_ages_stop_growing_after_the_end_of_the_run() -> None:
    view = RunView()
    view.apply(RUN)
    view.apply(moved(0, None, "fed", time=101.0))
    view.apply(RunEnded(time=103.0, reason="done"))
    figures = status(view, 500.0)
    assert (figures["elapsed"], figures["slots"]["live"][0][2], figures["ended"]) == (3.0, 2.0, "done")


def test_the_snapshot_has_the_first_and_the_last_score_of_a_data_set() -> None:
    view = RunView()
    for rollout in (-1, 4, 9):
        score = Evaluated(
            time=100.0,
            name="math",
            rollout=rollout,
            accuracy=0.1,
            reward=0,
            problems=1,
            seconds=1,
            truncated=0,
            versions=(0, 0),
        )
        view.apply(score)
    assert [score["rollout"] for score in status(view, 101.0)["scores"]["math"]] == [-1, 9]


def test_the_number_of_user_defined_names_is_limited() -> None:
    view = RunView()
    view.apply(RUN)
    for number in range(200):
        view.apply(GroupFiltered(time=101.0, sequence=number, reason=f"reason {number}"))
        score = Evaluated(
            time=100.0,
            name=f"set {number}",
            rollout=0,
            accuracy=0.1,
            reward=0,
            problems=1,
            seconds=1,
            truncated=0,
            versions=(0, 0),
        )
        view.apply(score)
    outcomes = status(view, 102.0)["outcomes"]
    assert (len(outcomes), outcomes["filtered: other"], sum(outcomes.values())) == (41, 160, 200)
    assert sum(name.startswith("eval:") for name in view.charts.figures("whole", 102.0)["series"]) == 24


def test_a_run_without_events_can_be_drawn() -> None:
    assert status(RunView(), 5.0)["elapsed"] == 0.0
    assert RunView().charts.figures("recent", 5.0)["series"] == {}
    assert RunView().charts.verdicts(5.0) == []


def test_queue_and_head_are_drawn_from_the_events_of_the_rollout_worker() -> None:
    view = RunView()
    view.apply(RUN)
    view.apply(QueueChanged(time=100.0, depth=7, blocked=2))
    pulse = Pulse(
        time=100.0,
        generating=1,
        rewarding=0,
        oldest=0,
        oldest_seconds=4.0,
        waits_for="slots",
        waits_seconds=1.0,
        head=0,
        head_state="in_flight",
        head_seconds=4.0,
        queue=7,
        blocked=2,
        collected=0,
        wanted=4,
        trainer_version=3,
        live_version=2,
        idle_seconds=0.0,
        warn_seconds=30.0,
    )
    view.apply(pulse)
    series = view.charts.figures("whole", 100.5)["series"]
    assert [series[name]["mean"][0] for name in ("queue", "blocked", "head_seconds", "version_lag")] == [7, 2, 4, 1]


def test_the_status_has_the_values_that_an_event_log_leaves_out() -> None:
    """A learner that waits for eight groups and has none is shown as `0 of 8`."""
    pulse = Pulse(
        time=102.0,
        generating=8,
        oldest_seconds=0.0,
        head=0,
        head_seconds=0.0,
        queue=0,
        wanted=8,
        trainer_version=0,
        live_version=0,
        idle_seconds=0.0,
        warn_seconds=30.0,
    )
    view = RunView()
    view.apply(RUN)
    view.apply(pulse)
    shown = json.loads(encode_json(status(view, 102.0)))
    assert (shown["pulse"]["collected"], shown["pulse"]["wanted"]) == (0, 8)
    assert shown["pulse"]["waits_for"] is None
