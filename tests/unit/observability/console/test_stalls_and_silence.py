"""A run that hangs: which process does not answer, the warnings, and the abort."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from miles_async.adapters.system.work_time import WorkTime
from miles_async.events import ClusterReady, EngineChanged, Event, GroupMoved, ProcessSilent, Pulse, TrainerPhaseChanged
from miles_async.observability.console.stall_report import StallReport, stall_facts
from miles_async.observability.metrics.scrape_targets import ScrapeTargets
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.view import RunView
from miles_async.scheduling.ledger import GroupState
from miles_async.scheduling.stall import StallClock, dumps_stacks
from tests.configuration import run_config
from workers.heartbeats import Heartbeat, Heartbeats, Probe

READY = ClusterReady(time=100.0, weight_transfer="p2p", warm_start_seconds=0.0, warm_start_cached=True)
PULSE = Pulse(
    time=110.0,
    generating=3,
    rewarding=1,
    oldest=7,
    oldest_seconds=9.0,
    waits_for="slots",
    waits_seconds=8.0,
    head=7,
    head_state="in_flight",
    head_seconds=9.5,
    queue=2,
    blocked=5,
    collected=1,
    wanted=4,
    trainer_version=3,
    live_version=2,
    idle_seconds=10.0,
    warn_seconds=0.0,
)


class Stalling:
    """A stall report that takes in events and the times at which they arrive."""

    def __init__(self, warn_seconds: float) -> None:
        self.view = RunView()
        self.report = StallReport(self.view, warn_seconds)

    def observe(self, event: Event, now: float) -> None:
        self.view.apply(event)
        self.report.observe(event, now)


MOVED: dict[str, Any] = {
    "sequence": 0,
    "feed_index": "f",
    "attempt": 0,
    "before": None,
    "after": "fed",
    "reason": None,
}


def test_a_stall_is_warned_of_once_per_interval_and_again_after_something_moved() -> None:
    clock = StallClock()
    assert [still for still in (0.0, 9.0, 10.0, 14.0, 20.0, 25.0) if clock.due(still, 10.0)] == [10.0, 20.0]
    assert not clock.due(1.0, 10.0)
    assert clock.due(10.0, 10.0)


@pytest.mark.parametrize("warn, abort, first", [(30.0, 600.0, 60.0), (30.0, 40.0, 30.0), (10.0, 25.0, 15.0)])
def test_stacks_are_dumped_with_the_second_warning_or_the_last_before_the_end(
    warn: float, abort: float, first: float
) -> None:
    assert dumps_stacks(first, warn, abort)
    assert not dumps_stacks(first - 0.1, warn, abort)


def test_a_stall_that_the_rollout_worker_cannot_report_is_reported_for_it() -> None:
    stalling = Stalling(warn_seconds=5.0)
    stalling.observe(READY, now=0.0)
    stalling.observe(PULSE, now=10.0)
    assert stalling.report.unreported_stall(20.0) is None
    stalling.observe(ProcessSilent(time=121.0, process="rollout", seconds=3.0), now=21.0)
    stalled = stalling.report.unreported_stall(21.0)
    assert stalled is not None
    assert (stalled.seconds, stalled.queue, stalled.collected, stalled.wanted) == (21.0, 2, 1, 4)
    assert stalling.report.unreported_stall(22.0) is None
    stalling.observe(ProcessSilent(time=123.0, process="rollout", seconds=0.0), now=23.0)
    assert stalling.report.unreported_stall(50.0) is None


def test_the_driver_counts_the_seconds_without_progress_that_the_rollout_worker_counts() -> None:
    stalling = Stalling(warn_seconds=5.0)
    stalling.observe(READY, now=0.0)
    # An evaluation runs for 650 seconds; the rollout worker does not count them.
    stalling.observe(replace(PULSE, idle_seconds=0.0), now=650.0)
    assert stalling.report.stalled_for(651.0) == 0.0
    assert stalling.report.stalled_for(656.0) == 6.0


def test_the_driver_knows_how_long_the_run_may_need_unless_the_rollout_worker_is_silent() -> None:
    stalling = Stalling(warn_seconds=5.0)
    stalling.observe(READY, now=0.0)
    stalling.observe(replace(PULSE, idle_seconds=0.0, warn_seconds=540.0), now=0.0)
    assert stalling.report.stalled_for(539.0) == 0.0
    assert stalling.report.stalled_for(541.0) == 541.0
    stalling.observe(ProcessSilent(time=121.0, process="rollout", seconds=3.0), now=0.0)
    assert stalling.report.stalled_for(6.0) == 6.0


@pytest.mark.parametrize("step", [600.0, -600.0])
def test_a_jump_of_the_wall_clock_is_no_stall(step: float) -> None:
    stalling = Stalling(warn_seconds=5.0)
    stalling.observe(READY, now=0.0)
    stalling.observe(replace(PULSE, time=PULSE.time + step, idle_seconds=1.0), now=10.0)
    stalling.observe(GroupMoved(time=102.0, counts={}, **MOVED), now=11.0)
    assert stalling.report.idle_seconds(12.0) == 3.0
    assert stalling.report.stalled_for(12.0) == 0.0


def test_the_report_shows_the_state_of_every_part() -> None:
    stalling = Stalling(warn_seconds=5.0)
    for event in (
        READY,
        EngineChanged(time=101.0, engine="engine-0", state="routed", version=2, reason=None),
        GroupMoved(time=102.0, counts={GroupState.IN_FLIGHT: 4, GroupState.QUEUED: 2, GroupState.LEASED: 0}, **MOVED),
        TrainerPhaseChanged(time=103.0, to="batch"),
        PULSE,
        ProcessSilent(time=111.0, process="engine-0", seconds=6.0),
    ):
        stalling.observe(event, now=11.0)
    facts = stall_facts(stalling.view)
    assert repr(facts["groups"]) == "{'in_flight': 4, 'queued': 2}", "as it stands on the terminal"
    assert (facts["head"], facts["head_state"], facts["head_age"]) == (7, "in_flight", "10s")
    assert (facts["oldest_request"], facts["oldest_request_engine"]) == ("group 7, 9s", "engine-0")
    assert facts["engines"] == {"engine-0": {"state": "routed", "version": 2}}
    assert facts["silent"] == {"engine-0": "6s"}
    assert (facts["admission_waits_for"], facts["trainer"]) == ("slots", "batch")
    assert (facts["trainer_version"], facts["live_version"]) == (3, 2)


def compute(cpu_seconds: float) -> None:
    """Use this much CPU time of the calling thread."""
    while time.thread_time() < cpu_seconds:
        pass


def test_a_rank_works_while_its_model_thread_computes_and_not_while_it_waits() -> None:
    work, released = WorkTime(), threading.Event()
    with ThreadPoolExecutor(1, initializer=work.count_this_thread) as model_thread:
        assert work.seconds == 0.0
        model_thread.submit(compute, 0.1).result()
        computed = work.seconds
        assert computed >= 0.1
        waiting = model_thread.submit(released.wait)
        # The CPU time of another thread, such as the one that answers heartbeats, does not count.
        compute(time.thread_time() + 0.1)
        assert work.seconds - computed < 0.05
        released.set()
        waiting.result()


def test_a_rank_works_while_it_writes_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    work, now = WorkTime(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with work.writing():
        now[0] += 700.0
        assert work.seconds == 700.0
    now[0] += 50.0
    assert work.seconds == 700.0


class Process:
    """Answers with a heartbeat that has these metrics, unless it is stopped."""

    def __init__(self, metrics: str | Literal[False] | None = None) -> None:
        self.heartbeat = Heartbeat("here", 0, metrics)
        self.running = asyncio.Event()
        self.running.set()

    async def ask(self) -> Heartbeat:
        await self.running.wait()
        return self.heartbeat


async def looks(process: Probe, *times: float) -> tuple[Heartbeats, list[tuple[float, float]]]:
    """The heartbeats after looking at these times, and the time and seconds of every reported silence."""
    beats = Heartbeats({"p": process}, "here")
    silences: list[tuple[float, float]] = []

    for now in times:
        silences.extend((now, silent.seconds) for silent in beats.look(now))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    beats.close()
    return beats, silences


async def test_a_process_that_answers_is_never_silent_and_reports_its_metrics_address() -> None:
    beats, silences = await looks(Process("127.0.0.1:8").ask, *[100.0 + i / 4 for i in range(40)])
    assert silences == [(100.0, 0.0)]  # so that its series is there from the start
    assert beats.addresses == {"p": "127.0.0.1:8"}


async def test_a_process_that_hangs_is_reported_every_second_until_it_answers_again() -> None:
    process = Process()
    process.running.clear()
    _, silences = await looks(process.ask, 100.0, 101.0, 102.0, 102.5, 103.0, 104.0)
    assert silences == [(100.0, 0.0), (102.0, 2.0), (103.0, 3.0), (104.0, 4.0)]


async def test_a_process_is_not_silent_because_the_driver_itself_was_stopped() -> None:
    process = Process()
    beats, silences = await looks(process.ask, 100.0, 101.0, 701.0, 702.0)
    assert silences == [(100.0, 0.0)]
    assert beats.silence("p", 702.0) == 0.0


async def test_a_process_that_hangs_is_found_although_the_driver_was_stopped_too() -> None:
    process = Process()
    process.running.clear()
    _, silences = await looks(process.ask, 100.0, 101.0, 701.0, 702.0)
    assert silences == [(100.0, 0.0), (702.0, 2.0)]


async def test_a_removed_engine_is_not_reported_as_unresponsive() -> None:
    probes: dict[str, Probe] = {"engine-1": Process(False).ask}
    beats = Heartbeats(probes, "here")

    silences = [silent.seconds for now in (100.0, 103.0) for silent in beats.look(now)]
    del probes["engine-1"]
    silences += [silent.seconds for now in (104.0, 105.0) for silent in beats.look(now)]
    assert silences == [0.0, 3.0, 0.0]


async def test_servers_that_return_errors_and_dead_actors_are_unresponsive() -> None:
    async def died() -> Heartbeat:
        raise OSError("gone")

    for process in (Process(False).ask, died):
        beats, silences = await looks(process, 100.0, 101.0, 102.0, 103.0)
        assert [seconds for _, seconds in silences] == [0.0, 2.0, 3.0]
        assert beats.addresses == {}


def test_prometheus_finds_the_run_and_its_engines_in_a_file_that_ends_with_the_run(tmp_path: Path) -> None:
    folder = RunFolder.create(run_config(run_dir=str(tmp_path)))
    targets = ScrapeTargets(folder, "http://127.0.0.1:9/metrics")
    targets.write({"engine-0": "10.0.0.2:81", "router": "10.0.0.1:82"})
    (file,) = (tmp_path / "targets").glob("*.json")
    entries = json.loads(file.read_text())
    assert [(entry["targets"], entry["labels"]["job"], entry["labels"]["process"]) for entry in entries] == [
        (["127.0.0.1:9"], "miles_async", "driver"),
        (["10.0.0.2:81"], "sglang", "engine-0"),
        (["10.0.0.1:82"], "sglang_router", "router"),
    ]
    targets.write({"engine-0": "10.0.0.3:81"})
    assert "10.0.0.3:81" in file.read_text()
    assert "10.0.0.2:81" not in file.read_text()
    targets.remove()
    assert list((tmp_path / "targets").iterdir()) == []
