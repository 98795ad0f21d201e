"""The metrics while a run progresses, hangs and publishes."""

from __future__ import annotations

import math
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from miles_async.errors import UserError
from miles_async.events import (
    AdmissionBlocked,
    AgentSessionExpired,
    CheckpointWritten,
    DataSkipped,
    DeadLettered,
    DeadLettersUnwritten,
    EngineBusy,
    EngineChanged,
    Evaluated,
    EvaluationSkipped,
    Event,
    GroupFiltered,
    GroupGenerated,
    GroupMoved,
    LearnerRestored,
    ProcessSilent,
    PublishEnded,
    PublishStarted,
    Pulse,
    QueueChanged,
    RouterChanged,
    RunContinued,
    RunEnded,
    SampleDiscarded,
    SamplesRemoved,
    StepEnded,
    StepStarted,
)
from miles_async.observability.diagnosis.verdict import Bottleneck
from miles_async.observability.http_server import HttpServer
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.page.document import LivePage
from miles_async.observability.state.engines import IdleCause
from miles_async.observability.view import RunView
from tests.unit.example_events import RUN
from tests.waiting import PATIENCE_SECONDS


class Watched:
    """A registry with the metrics of the events observed so far."""

    def __init__(self, *events: Event) -> None:
        self.registry = CollectorRegistry()
        self.view = RunView()
        self.metrics = MetricsRecorder(self.registry, self.view)
        self.observe(*events)

    def observe(self, *events: Event) -> None:
        for event in events:
            self.view.apply(event)
            self.metrics.observe(event)

    def __call__(self, name: str, /, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"miles_async_{name}", labels)


def moved(after: str, time: float = 101.0, reason: str | None = None, **counts: int) -> GroupMoved:
    return GroupMoved(
        time=time,
        sequence=0,
        feed_index="sample_0_0",
        attempt=0,
        before=None,
        after=after,
        reason=reason,
        counts=counts,
    )


def step(started: float, ended: float, staleness: list[int], *, rollout: int = 0) -> list[Event]:
    groups = list(range(len(staleness)))
    begin = StepStarted(time=started, rollout=rollout, version=1, staleness=staleness, groups=groups)
    end = StepEnded(
        time=ended,
        rollout=rollout,
        seconds=ended - started,
        tokens=50,
        finite=True,
        reward=0.5,
        response_length=4.0,
        metrics={"loss": 0.1},
    )
    return [begin, end]


def published(version: int, *, live: bool = True, fenced: tuple[str, ...] = ()) -> PublishEnded:
    return PublishEnded(
        time=105.0,
        version=version,
        live=live,
        staged_seconds=0.02,
        paused_seconds=0.04,
        stopping_seconds=0.002,
        write_seconds=0.03,
        resuming_seconds=0.003,
        bytes=1_000,
        queue=0,
        fenced=list(fenced),
    )


def test_every_metric_carries_the_prefix_and_a_help_text() -> None:
    families = list(Watched(RUN).registry.collect())
    assert len(families) > 30
    assert all(family.name.startswith("miles_async_") and family.documentation for family in families)


def test_queue_and_group_gauges_follow_each_event() -> None:
    watched = Watched(RUN, QueueChanged(time=101.0, depth=7, blocked=2), moved("in_flight", in_flight=5, queued=7))
    assert watched("queue_depth_groups") == 7
    assert watched("queue_capacity_groups") == 1000
    assert watched("blocked_groups") == 2
    assert watched("in_flight_groups") == 5
    assert watched("groups", state="queued") == 7
    assert watched("groups", state="leased") == 0


def test_ended_groups_are_counted_by_outcome_and_reason_and_stale_ones_as_recycled() -> None:
    watched = Watched(moved("dropped", reason="stale"), moved("dropped", reason="filtered"), moved("published"))
    assert watched("ended_groups_total", outcome="dropped", reason="stale") == 1
    assert watched("ended_groups_total", outcome="dropped", reason="filtered") == 1
    assert watched("ended_groups_total", outcome="published", reason="") == 1
    assert watched("recycled_groups_total") == 1


def test_wasted_tokens_are_counted_by_reason() -> None:
    watched = Watched(
        replace(moved("dropped", reason="stale"), discarded_tokens=30),
        SampleDiscarded(time=1.0, sequence=0, sample=3, reason="failed", tokens=5, error="no tools"),
    )
    assert watched("wasted_tokens_total", reason="stale") == 30
    assert watched("wasted_tokens_total", reason="failed") == 5
    assert watched("wasted_tokens_total", reason="publish") == 0


def test_staleness_histogram_counts_each_group_of_a_step() -> None:
    watched = Watched(RUN, *step(110.0, 111.0, [0, 2, 2]))
    assert watched("staleness_versions_bucket", groups="trained", le="0.0") == 1
    assert watched("staleness_versions_bucket", groups="trained", le="2.0") == 3
    assert watched("step_tokens_total") == 50
    assert watched("step_metric", name="loss") == 0.1


def test_seconds_without_progress_count_from_the_last_progress() -> None:
    watched = Watched(RUN, moved("queued", time=120.0), pulse(121.0, idle_seconds=1.0))
    watched.metrics.tick(150.0)
    assert watched("since_progress_seconds") == 30
    assert watched("last_progress_timestamp_seconds", what="queued") == 120


def test_learner_idle_seconds_grow_between_steps_only() -> None:
    watched = Watched(RUN)
    watched.metrics.tick(104.0)
    assert watched("learner_idle_seconds_total") == 0, "the training phase begins with the first step"
    begin, end = step(106.0, 109.0, [0])
    watched.observe(begin)
    watched.metrics.tick(108.0)
    assert watched("learner_idle_seconds_total") == 0
    watched.observe(end)
    watched.metrics.tick(110.0)
    assert watched("learner_idle_seconds_total") == 1


def test_idle_seconds_counted_before_a_late_event_are_not_counted_twice() -> None:
    watched = Watched(RUN, *step(100.0, 101.0, [0]))
    watched.metrics.tick(108.0)
    assert watched("learner_idle_seconds_total") == 7
    watched.observe(*step(106.0, 109.0, [0], rollout=1))
    watched.metrics.tick(110.0)
    assert watched("learner_idle_seconds_total") == 7
    watched.metrics.tick(113.0)
    assert watched("learner_idle_seconds_total") == 9


def test_engine_idle_seconds_stand_still_while_requests_are_in_flight() -> None:
    watched = Watched(RUN, *step(100.0, 101.0, [0]), EngineBusy(time=110.0, busy=7.0, in_flight=3))
    watched.metrics.tick(120.0)
    assert watched("engine_idle_seconds_total") == 3
    assert watched("in_flight_requests") == 3
    watched.observe(EngineBusy(time=120.0, busy=17.0, in_flight=0))
    watched.metrics.tick(125.0)
    assert watched("engine_idle_seconds_total") == 8


def test_a_publish_raises_the_version_of_routed_engines_only() -> None:
    watched = Watched(
        EngineChanged(time=101.0, engine="a", state="routed", version=0, reason=None),
        EngineChanged(time=101.0, engine="b", state="routed", version=0, reason=None),
        PublishStarted(time=104.0, version=1, queue=0),
        published(1, fenced=("b",)),
    )
    assert watched("trainer_weight_version") == 1
    assert watched("engine_weight_version", engine="a") == 1
    assert watched("engine_weight_version", engine="b") == 0
    pause = [watched("publish_seconds_sum", phase=phase) for phase in ("stopping", "write", "commit", "resuming")]
    assert pause == pytest.approx([0.002, 0.03, 0.005, 0.003])
    assert watched("publish_seconds_sum", phase="paused") == 0.04
    assert watched("publish_bytes_total") == 1000


def test_a_publish_to_no_engine_leaves_the_version_gauges_unchanged() -> None:
    watched = Watched(
        EngineChanged(time=101.0, engine="a", state="routed", version=0, reason=None), published(1, live=False)
    )
    assert watched("engine_weight_version", engine="a") == 0
    assert watched("publishes_total", outcome="failed") == 1


def test_blocked_admission_is_counted_by_cause() -> None:
    watched = Watched(
        AdmissionBlocked(time=101.0, cause="slots", seconds=0.5),
        AdmissionBlocked(time=102.0, cause="slots", seconds=0.25),
    )
    assert watched("admission_blocked_seconds_total", cause="slots") == 0.75


def test_metrics_are_served_on_loopback_until_closed() -> None:
    watched = Watched(RUN, QueueChanged(time=101.0, depth=7, blocked=0))
    server = HttpServer(watched.registry, LivePage(RunView()), port=0)
    try:
        with urlopen(server.url, timeout=PATIENCE_SECONDS) as response:
            assert "miles_async_queue_depth_groups 7.0" in response.read().decode()
    finally:
        server.close()
    with pytest.raises(OSError, match="refused"):
        urlopen(server.url, timeout=PATIENCE_SECONDS)


def test_a_port_in_use_is_named_in_the_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"metrics_port {port} .*set --metrics-port"):
            HttpServer(CollectorRegistry(), LivePage(RunView()), port)


def test_metrics_give_a_reason_for_every_dropped_or_skipped_group() -> None:
    see = Watched(
        RUN,
        GroupFiltered(time=101.0, sequence=1, reason="all_0"),
        GroupFiltered(time=101.0, sequence=2, reason="all_0"),
        GroupFiltered(time=101.0, sequence=3, reason="over_sampling"),
        SamplesRemoved(time=102.0, rollout=0, samples=5, tokens=40),
        DataSkipped(time=103.0, reason="bad_row", sentence="data.jsonl, line 4: no key 'label'"),
        AgentSessionExpired(time=103.0),
        DeadLettered(time=104.0, feed_index="sample_0_1", reason="failed"),
        DeadLettersUnwritten(time=104.0, letters=2, prompts=["sample_0_1"], error="No space left on device"),
    )
    assert see("dead_letters_total") == 1
    assert see("unwritten_dead_letters") == 2
    assert see("filtered_groups_total", reason="all_0") == 2
    assert see("filtered_groups_total", reason="over_sampling") == 1
    assert see("removed_samples_total") == 5
    assert see("expired_agent_sessions_total") == 1
    assert see("skipped_data_total", reason="bad_row") == 1


def generated(sequence: int, started: float, ended: float, versions: tuple[int, int]) -> GroupGenerated:
    return GroupGenerated(
        time=ended,
        sequence=sequence,
        generation_seconds=ended - started,
        reward_seconds=0.0,
        versions=versions,
        response_tokens=10,
        reward=1.0,
        truncated=1,
        unfinished_rewards=2,
    )


def test_reused_keys_are_counted_with_their_age() -> None:
    group = replace(generated(0, 101.0, 105.0, (3, 5)), reused_tokens=70, key_age=2)
    see = Watched(RUN, moved("fed"), group)
    assert see("reused_tokens_total") == 70
    assert (see("key_age_versions_sum"), see("key_age_versions_count")) == (2, 1)


def pulse(time: float, **changes: Any) -> Pulse:
    figures: dict[str, Any] = {
        "generating": 0,
        "rewarding": 0,
        "oldest": None,
        "oldest_seconds": 0.0,
        "waits_for": None,
        "waits_seconds": 0.0,
        "head": 0,
        "head_state": None,
        "head_seconds": 0.0,
        "queue": 0,
        "blocked": 0,
        "collected": 0,
        "wanted": 0,
        "trainer_version": 0,
        "live_version": 0,
        "idle_seconds": 0.0,
        "warn_seconds": 30.0,
    }
    return Pulse(time=time, **{**figures, **changes})


def test_staleness_is_the_sum_of_publish_lag_sampling_and_waiting() -> None:
    # Sampled from version 0 while 1 was staged already; 2 came while it was generated, 3 and 4 while it waited.
    see = Watched(
        RUN,
        PublishStarted(time=100.0, version=0, queue=0),
        PublishStarted(time=104.0, version=1, queue=0),
        PublishStarted(time=107.0, version=2, queue=0),
        moved("fed"),
        generated(0, started=105.0, ended=109.0, versions=(0, 1)),
        PublishStarted(time=110.0, version=3, queue=0),
        PublishStarted(time=112.0, version=4, queue=0),
        StepStarted(time=113.0, rollout=0, version=4, staleness=[4], groups=[0]),
    )
    versions = {part: see("staleness_part_versions_sum", part=part) for part in ("publish_lag", "sampling", "waiting")}
    assert versions == {"publish_lag": 1, "sampling": 1, "waiting": 2}
    seconds = {part: see("staleness_part_seconds_sum", part=part) for part in ("publish_lag", "sampling", "waiting")}
    assert seconds == {"publish_lag": 1.0, "sampling": 4.0, "waiting": 4.0}
    assert see("staleness_seconds_sum", groups="trained") == 8.0


def test_metrics_show_the_ages_of_recycled_and_queued_groups() -> None:
    see = Watched(
        RUN,
        PublishStarted(time=101.0, version=3, queue=0),
        moved("fed"),
        generated(0, started=102.0, ended=103.0, versions=(1, 1)),
        moved("queued", time=104.0),
        moved("dropped", time=106.0, reason="stale"),
    )
    assert see("unfinished_rewards_total") == 2
    assert see("staleness_versions_sum", groups="queued") == 2
    assert see("staleness_seconds_sum", groups="recycled") == 4.0


def test_blocked_admission_is_counted_while_it_lasts_and_once() -> None:
    see = Watched(RUN, pulse(103.0, waits_for="slots", waits_seconds=2.0))
    assert see("admission_blocked_seconds_total", cause="slots") == 2.0
    see.observe(AdmissionBlocked(time=104.0, cause="slots", seconds=3.0))
    assert see("admission_blocked_seconds_total", cause="slots") == 3.0


def test_an_evaluation_names_its_weight_versions_and_skipped_ones_are_counted() -> None:
    scores: dict[str, Any] = {"accuracy": 0.5, "reward": 0.5, "problems": 8, "seconds": 9.0, "truncated": 0.0}
    see = Watched(
        RUN,
        EvaluationSkipped(time=103.0, rollout=4, overtaken_by=9),
        EvaluationSkipped(time=104.0, rollout=9, overtaken_by=14),
        Evaluated(time=105.0, name="math", rollout=14, versions=(14, 16), missing=3, **scores),
    )
    assert see("eval_missing_samples", name="math") == 3
    assert see("skipped_evaluations_total") == 2
    assert see("eval_oldest_weight_version", name="math") == 14
    assert see("eval_newest_weight_version", name="math") == 16


def test_gauges_of_head_oldest_request_and_versions_change_without_group_events() -> None:
    see = Watched(RUN, pulse(103.0, head_seconds=7.0, oldest_seconds=6.0, rewarding=2, live_version=4))
    assert see("head_age_seconds") == 7.0
    assert see("oldest_request_seconds") == 6.0
    assert see("rewarding_groups") == 2
    assert see("live_weight_version") == 4


def test_the_series_of_a_lost_engine_are_removed() -> None:
    def engine(state: str) -> EngineChanged:
        return EngineChanged(time=101.0, engine="a", state=state, version=0, reason=None)

    see = Watched(engine("routed"), ProcessSilent(time=102.0, process="a", seconds=3.0))
    assert see("process_silent_seconds", name="a") == 3.0
    see.observe(engine("fenced"))
    assert see("engine_routed", engine="a") == 0
    see.observe(engine("lost"))
    assert see("engine_routed", engine="a") is None
    assert see("engine_weight_version", engine="a") is None
    assert see("process_silent_seconds", name="a") is None
    see.observe(ProcessSilent(time=103.0, process="a", seconds=0.0))  # what heartbeats say of one that was removed
    assert see("process_silent_seconds", name="a") is None
    see.observe(engine("routed"), ProcessSilent(time=104.0, process="a", seconds=0.0))
    assert see("process_silent_seconds", name="a") == 0


def test_a_driver_that_continues_a_run_forgets_the_processes_of_the_driver_before_it() -> None:
    fenced = EngineChanged(time=150.0, engine="a", state="fenced", version=0, reason="it is slow")
    stuck = pulse(150.0, head_seconds=300.0, blocked=3, idle_seconds=200.0, warn_seconds=30.0)
    see = Watched(RUN, fenced, stuck, RouterChanged(time=150.0, up=False, engines=1, healthy=0), *step(151, 152, [0]))
    see.metrics.tick(160.0)
    assert (see("since_progress_seconds"), see("head_age_seconds"), see("training")) == (210.0, 300.0, 1.0)
    see.observe(replace(RUN, time=200.0), fenced, stuck, RouterChanged(time=150.0, up=False, engines=1, healthy=0))
    see.metrics.tick(260.0)
    assert (see("since_progress_seconds"), see("head_age_seconds"), see("training")) == (0.0, 0.0, 0.0)
    assert see("engine_routed", engine="a") is None
    assert math.isnan(see("router_up") or 0.0)
    see.observe(pulse(261.0, head_seconds=1.0, idle_seconds=1.0), *step(261.0, 262.0, [0]))
    see.metrics.tick(262.0)
    assert (see("since_progress_seconds"), see("head_age_seconds"), see("training")) == (2.0, 1.0, 1.0)


def test_a_run_that_has_ended_does_not_train() -> None:
    see = Watched(RUN, *step(151, 152, [0]))
    assert see("training") == 1
    see.observe(RunEnded(time=160.0, reason="done"))
    assert see("training") == 0


@pytest.mark.parametrize("name", ["slots_groups", "staleness_limit_versions", "router_up", "slow_group_seconds"])
def test_a_value_that_is_not_known_is_not_zero(name: str) -> None:
    assert math.isnan(Watched(replace(RUN, slots=None))(name) or 0.0)


def test_the_first_failed_publish_is_an_increase() -> None:
    assert Watched()("publishes_total", outcome="failed") == 0


def test_restarts_and_undone_batches_are_counted_and_the_rest_of_the_run_takes_longer_after_a_rollback() -> None:
    def trained(rollout: int) -> list[Event]:
        begin, end = step(10.0 * rollout + 110.0, 10.0 * rollout + 120.0, [0])
        return [replace(begin, rollout=rollout), replace(end, rollout=rollout)]

    see = Watched(RUN, *[event for rollout in range(4) for event in trained(rollout)], pulse(150.0))
    see.metrics.tick(150.0)
    assert see("eta_seconds") == 60.0, "six batches of ten seconds"
    see.observe(
        RunContinued(time=151.0),
        LearnerRestored(time=151.0, rollout=1, kept_version=2, version=5, updates=0, groups=2),
    )
    see.metrics.tick(152.0)
    assert see("restarts_total", name="learner") == 1
    assert see("undone_batches_total") == 2
    assert see("rollout_batches") == 2
    assert see("eta_seconds") == 160.0, "eight batches of twenty seconds"
    assert math.isnan(see("lost_driver_replaced_timestamp_seconds") or 0.0)
    see.observe(replace(RUN, time=200.0))
    see.metrics.tick(201.0)
    assert see("restarts_total", name="driver") == 1
    assert see("lost_driver_replaced_timestamp_seconds") == 200.0
    see.observe(RunEnded(time=210.0, reason="interrupted"), replace(RUN, time=300.0))
    see.metrics.tick(301.0)
    assert see("lost_driver_replaced_timestamp_seconds") == 200.0, "the driver before had ended the run"


def test_batches_are_unsaved_until_a_checkpoint_has_them() -> None:
    see = Watched(replace(RUN, save_interval=2), *step(110.0, 111.0, [0]))
    see.metrics.tick(112.0)
    assert (see("unsaved_batches"), see("save_interval_batches")) == (1, 2)
    see.observe(CheckpointWritten(time=113.0, rollout=0))
    see.metrics.tick(114.0)
    assert (see("unsaved_batches"), see("last_checkpoint_timestamp_seconds")) == (0, 113.0)


@pytest.mark.parametrize(
    "cause, changes",
    [
        ("learner", {"waits_for": "slots"}),
        ("window", {"waits_for": "slots", "blocked": 3}),
        ("reward", {"rewarding": 2}),
        ("no_engine", {"waits_for": "no_engine"}),
        ("other", {}),
    ],
)
def test_idle_engines_have_a_cause(cause: str, changes: dict[str, Any]) -> None:
    routed = EngineChanged(time=101.0, engine="a", state="routed", version=0, reason=None)
    see = Watched(RUN, routed, EngineBusy(time=102.0, busy=0.0, in_flight=0))
    see.metrics.tick(103.0)
    assert see("engines_idle", cause="start") == 1
    see.observe(pulse(104.0, **changes))
    see.metrics.tick(105.0)
    assert {each: see("engines_idle", cause=each) for each in IdleCause} == {each: each == cause for each in IdleCause}
    see.observe(EngineBusy(time=106.0, busy=0.0, in_flight=1))
    see.metrics.tick(107.0)
    assert see("engines_idle", cause=cause) == 0


def test_the_free_space_of_the_disk_of_a_folder_is_served_before_the_folder_exists(tmp_path: Path) -> None:
    see = Watched()
    see.metrics.watch_disks({"save": tmp_path / "not" / "yet"})
    assert see("disk_free_bytes", folder="save") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_label_values_of_users_are_escaped_and_bounded_in_number() -> None:
    rude = 'say "all"\n\\'
    see = Watched(GroupFiltered(time=101.0, sequence=0, reason=rude))
    see.observe(*[GroupFiltered(time=101.0, sequence=i, reason=f"reason {i}") for i in range(500)])
    text = generate_latest(see.registry).decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    values = families["miles_async_filtered_groups"]
    assert len(values) == 65
    assert sum(sample.value for sample in values) == 501
    assert rude in {sample.labels["reason"] for sample in values}
    assert see("filtered_groups_total", reason="other") == 501 - 64


def test_one_verdict_is_set_at_a_time_and_trainer_seconds_never_decrease() -> None:
    see = Watched(RUN)
    see.view.learner.add(106.0, 5.0, "window", held_back=False)
    see.view.learner.add(107.0, 1.0, "step", held_back=False)
    see.metrics.tick(107.0)
    assert [see("verdict", verdict=kind) for kind in Bottleneck].count(1.0) == 1
    assert see("verdict", verdict="window-bound") == 1
    see.view.learner.seconds.update(window=4.0, step=3.0)
    see.metrics.tick(108.0)
    assert see("trainer_seconds_total", doing="window") == 5.0
    assert see("trainer_seconds_total", doing="step") == 3.0


def test_a_scrape_during_shutdown_ends_and_does_not_delay_it(capfd: pytest.CaptureFixture[str]) -> None:
    see = Watched(RUN)
    server = HttpServer(see.registry, LivePage(RunView()), port=0)
    stopping = threading.Event()
    outcomes: list[str] = []

    def scrape() -> None:
        while not stopping.is_set():
            try:
                with urlopen(server.url, timeout=PATIENCE_SECONDS) as response:
                    outcomes.append(str(response.status))
                    response.read()
            except OSError:
                outcomes.append("refused")
                return

    scrapers = [threading.Thread(target=scrape) for _ in range(4)]
    for scraper in scrapers:
        scraper.start()
    while "200" not in outcomes:
        time.sleep(0.001)
    server.close()
    stopping.set()
    for scraper in scrapers:
        scraper.join(PATIENCE_SECONDS)
    assert not any(scraper.is_alive() for scraper in scrapers)
    assert capfd.readouterr().err == ""


def test_metrics_show_added_and_removed_engines_and_the_health_of_the_router() -> None:
    watched = Watched(
        EngineChanged(time=101.0, engine="a", state="fenced", version=3, reason="it drew no token"),
        RouterChanged(time=101.0, up=True, engines=3, healthy=2),
    )
    assert watched("engine_changes_total", engine="a", state="fenced") == 1
    assert watched("router_up") == 1
    assert watched("router_engines", health="healthy") == 2
    assert watched("router_engines", health="unhealthy") == 1
    watched.observe(RouterChanged(time=102.0, up=False, engines=0, healthy=0))
    assert watched("router_up") == 0


def test_each_data_set_has_its_reward_share_and_position() -> None:
    see = Watched(RUN)
    for sequence, (name, reward, epochs) in enumerate([("math", 1.0, 0.5), ("math", 0.5, 0.25), ("code", 0.0, 1.5)]):
        see.observe(replace(generated(sequence, 101.0, 102.0, (0, 0)), dataset=name, reward=reward, epochs=epochs))
    see.observe(*(replace(moved("published"), dataset=name) for name in ("math", "math", "math", "code")))
    see.observe(replace(moved("dropped", reason="filtered"), dataset="code"))
    assert see("dataset_reward", dataset="math") == 0.75
    assert see("dataset_epochs", dataset="math") == 0.5
    assert see("dataset_trained_groups", dataset="math") == 3
    assert see("dataset_share_ratio", dataset="code") == 0.25
    assert see("dataset_filtered_groups", dataset="code") == 1
    # The learner was lost, and the last group returns to the queue.
    see.observe(replace(moved("queued"), before="published", dataset="code"))
    assert see("dataset_trained_groups", dataset="code") == 0


def test_a_run_with_one_data_set_has_no_metrics_of_data_sets() -> None:
    see = Watched(RUN, generated(0, 101.0, 102.0, (0, 0)), moved("published"))
    assert [family.name for family in see.registry.collect() if "dataset_" in family.name and family.samples] == []
