"""A real Prometheus with the shipped rules scrapes a run while it lasts, and shows one that has ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import yaml

from dashboards.build import FOLDER, write
from dashboards.content import ALL
from dashboards.panels import Dashboard
from dashboards.pictures import Answers, draw, training_span
from dashboards.pictures import main as write_pictures
from dashboards.prometheus import Prometheus, load_recorded
from dashboards.prometheus import main as monitor
from miles_async.adapters.ray.learner import RayLearner, RayRanks
from miles_async.adapters.system.network_ports import free_port
from miles_async.events import ClusterReady, EngineChanged, Event, ProcessSilent, TrainerPhaseChanged
from miles_async.observability.diagnosis.verdict import SILENT_SECONDS, Bottleneck
from miles_async.observability.run_folder import RunFolder
from miles_async.observability.subscribers import EventSubscribers
from miles_async.observability.view import RunView
from miles_async.pipeline.monitor import MIN_WORK_SECONDS
from tests.stack.conftest import Played, Stack, settings
from tests.unit.observability.metrics.alert_scenarios import RULES, promtool
from tests.waiting import PATIENCE_SECONDS, START_SECONDS, wait_until
from workers.driver import run_started
from workers.heartbeats import Heartbeats
from workers.watchdog import dump_stacks

ALERTS = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
RECORDED = yaml.safe_load((RULES / "recording.yml").read_text())["groups"][0]["rules"]
EXPRESSIONS = [
    (f"{dashboard.name}: {panel.title}", expression)
    for dashboard in ALL
    for panel in dashboard.panels
    for expression in panel.queries.values()
]
RUN = ("train_async.py", "--num-rollout", "8")
ADAPTERS = "miles_async_adapter_requests"


def as_grafana_asks(expression: str) -> str:
    return expression.replace("$run", ".*").replace("$__rate_interval", "1m")


def empty(prometheus: Prometheus, expressions: Sequence[tuple[str, str]], at: float | None = None) -> list[str]:
    """Returns the names of the expressions that have no result."""
    return [f"{what}: {expression}" for what, expression in expressions if not prometheus.query(expression, at)]


def asked() -> list[tuple[str, str]]:
    """Every panel's expression, every recording rule, and every series that an alert looks at.

    The run trains no adapter, so the panel of adapters has no data.
    """
    panels = [(what, as_grafana_asks(expression)) for what, expression in EXPRESSIONS if ADAPTERS not in expression]
    rules = [(rule["record"], rule["record"]) for rule in RECORDED]
    alerts = [
        (rule["alert"], series) for rule in ALERTS for series in re.findall(r"miles_async[\w:]+|\bup\b", rule["expr"])
    ]
    return panels + rules + alerts


def test_the_configuration_is_valid() -> None:
    assert promtool("check", "config", "../prometheus.yml") == ""


def test_the_committed_dashboards_are_up_to_date(tmp_path: Path) -> None:
    for path in write(tmp_path):
        assert path.read_text() == (FOLDER / path.name).read_text(), f"{path.name} is old: run `make dashboards`"


def test_a_folder_without_a_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is not a readable run folder: .*No such file.*events\.jsonl"):
        monitor(["--recorded", str(tmp_path)])
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match=r"is not a readable run folder: .*line 1: not an event"):
        monitor(["--recorded", str(tmp_path)])


def test_the_samples_of_make_monitoring_are_kept_when_it_ends(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    target = {"targets": [f"127.0.0.1:{free_port()}"], "labels": {"process": "driver"}}
    (tmp_path / "targets" / "a-run.json").write_text(json.dumps([target]))
    port = free_port()
    server = Prometheus(tmp_path, port=port)
    command = [sys.executable, "-m", "dashboards.prometheus", "--runs", str(tmp_path), "--port", str(port)]
    # Background jobs of a shell ignore SIGINT, and so do the processes that the job starts.
    monitoring = subprocess.Popen(
        command,
        cwd=FOLDER.parents[1],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(
            lambda: answers(server) == {"driver": False}, "the target was scraped", within=START_SECONDS, every=0.5
        )
        scraped = time.time()
    finally:
        monitoring.send_signal(signal.SIGINT)
        assert monitoring.wait(PATIENCE_SECONDS) == 0
    with Prometheus(tmp_path, storage=tmp_path / "prometheus") as later:
        assert later.query("up", scraped) != []


def answers(server: Prometheus) -> dict[str, bool]:
    """What the server could scrape; nothing before it is ready."""
    try:
        return server.up()
    except (OSError, ValueError):  # it does not listen yet, or does not answer with JSON yet
        return {}


@dataclass
class Monitored:
    played: Played
    folder: RunFolder
    """The run folder of the subscribers."""
    prometheus: Prometheus
    subscribers: EventSubscribers


@pytest.fixture(scope="module")
def monitored(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """A run that Prometheus scraped while it went on; its metrics are still served."""
    with ExitStack() as until_the_end:
        config = settings(*RUN, "--run-dir", str(tmp_path_factory.mktemp("monitored")))
        folder = RunFolder.create(config)
        subscribers = until_the_end.enter_context(EventSubscribers(config, folder))
        prometheus = until_the_end.enter_context(Prometheus(folder.path.parent, scrape_seconds=3))
        heartbeats = Heartbeats(stack.cluster.probes, "this node")
        until_the_end.callback(heartbeats.close)

        def watch(event: Event) -> None:
            now = time.monotonic()
            subscribers.emit(event, *heartbeats.look(now))
            subscribers.update_scrape_targets(heartbeats.addresses)
            subscribers.tick(now)

        async def start() -> None:
            watch(run_started(config, folder, RUN[0], "a model"))
            for engine in stack.cluster.handles.engines:
                watch(EngineChanged(time=time.time(), engine=engine.name, state="routed", version=0, reason=None))
            watch(ClusterReady(time=time.time(), weight_transfer="p2p", warm_start_seconds=0.0, warm_start_cached=True))

        stack.do(start())
        played = stack.play(*RUN, watch=watch)
        yield Monitored(played, folder, prometheus, subscribers)


def test_prometheus_finds_driver_engine_and_router_of_the_run(monitored: Monitored) -> None:
    prometheus = monitored.prometheus
    assert prometheus.up() == {"driver": True, "engine-0": True, "router": True}


def test_every_panel_rule_and_alert_has_data(monitored: Monitored) -> None:
    prometheus, subscribers = monitored.prometheus, monitored.subscribers
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (missing := empty(prometheus, asked())) and time.monotonic() < deadline:
        time.sleep(1)
        subscribers.tick(time.monotonic())
    assert missing == []


def test_the_metrics_of_the_run_agree_with_its_events(monitored: Monitored) -> None:
    played, prometheus = monitored.played, monitored.prometheus
    assert played.violations == []
    # The last batch shows with the scrape after it.
    wanted = str(played.config.rollout.num_rollout)
    wait_until(
        lambda: prometheus.query("miles_async_rollout_batches")[0]["value"][1] == wanted,
        f"Prometheus shows {wanted} batches",
        every=0.5,
    )
    parts = {
        part["metric"]["part"]: float(part["value"][1])
        for part in prometheus.query("miles_async_staleness_part_versions_sum")
    }
    (whole,) = prometheus.query('miles_async_staleness_versions_sum{groups="trained"}')
    assert sum(parts.values()) == float(whole["value"][1])
    assert min(parts.values()) >= 0


def test_a_recorded_run_can_be_shown_in_prometheus(monitored: Monitored, tmp_path: Path) -> None:
    played = monitored.played
    monitored.subscribers.tick(time.monotonic() + 2)  # what the trace holds back for a second reaches the disk
    _, ended = load_recorded(monitored.folder.path, tmp_path)
    with Prometheus(tmp_path, storage=tmp_path) as prometheus:
        (batches,) = prometheus.query("miles_async_rollout_batches", ended)
        assert batches["value"][1] == str(played.config.rollout.num_rollout)
        theirs = re.compile(r"sglang|smg_|disk_free|\bup\b")
        ours = [(what, expression) for what, expression in asked() if not theirs.search(expression)]
        assert empty(prometheus, ours, ended) == []


@pytest.mark.parametrize("dashboard", ALL, ids=lambda dashboard: dashboard.name)
def test_a_picture_of_a_dashboard_has_the_curves_of_every_panel(monitored: Monitored, dashboard: Dashboard) -> None:
    path = monitored.folder.path
    answers = Answers(monitored.prometheus, path.name, *training_span(path))
    axes = {one.get_title(loc="left"): one for one in draw(dashboard, answers).axes if one.get_title(loc="left")}
    assert list(axes) == [panel.title for panel in dashboard.panels]
    for panel in dashboard.panels:
        if panel.kind == "lines":
            drawn = {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in axes[panel.title].lines}
            known = {one.legend: one.values for one in answers.series(panel)}
            assert drawn.keys() <= known.keys()
            assert all(drawn[legend] == pytest.approx(known[legend], nan_ok=True) for legend in drawn)
            assert drawn or panel.title == "Requests by version of the adapter", panel.title


def test_the_pictures_of_a_recorded_run_are_written(monitored: Monitored, tmp_path: Path) -> None:
    monitored.subscribers.tick(time.monotonic() + 2)
    write_pictures([str(monitored.folder.path), "--folder", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{dashboard.name}.png" for dashboard in ALL)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_processes_that_are_stopped_are_named_and_their_stacks_are_read(stack: Stack, tmp_path: Path) -> None:
    learner = ray.get(stack.cluster.handles.learner_ranks[0].heartbeat.remote()).pid
    (engine,) = stack.cluster.handles.engines
    silences = stack.do(_silences_while_stopped(stack, learner, engine.pid, tmp_path))
    for process, verdict in (("learner-0", Bottleneck.TRAINER), ("engine-0", Bottleneck.ROLLOUT)):
        view = RunView()
        view.apply(TrainerPhaseChanged(time=silences[0].time, to="publish"))
        for silent in silences:
            if silent.process == process:
                view.apply(silent)
        assert view.finding.verdict is verdict
        assert view.finding.why.startswith(f"{process} has not answered for")
    assert {silent.process for silent in silences if silent.seconds} == {"learner-0", "engine-0"}
    (stacks,) = tmp_path.glob("stacks-*.txt")
    learners = stacks.read_text().split("==== ")[1]
    assert f"pid {learner}, stopped" in learners
    assert "run_actor_task" in learners or "Thread" in learners


def test_a_learner_works_while_it_computes_and_a_stopped_one_does_not_answer(stack: Stack) -> None:
    ranks = stack.cluster.handles.learner_ranks
    learner = RayLearner(settings(RUN[0]), RayRanks(ranks), "run")
    before = stack.do(learner.work_seconds())
    ray.get([rank.logprobs.remote([[1, 2, 3]] * 64) for rank in ranks])
    after = stack.do(learner.work_seconds())
    assert after > before
    assert stack.do(learner.work_seconds()) - after < MIN_WORK_SECONDS
    stack.do(_asked_while_stopped(learner, ray.get(ranks[0].heartbeat.remote()).pid))


async def _asked_while_stopped(learner: RayLearner, pid: int) -> None:
    _stop(pid)
    try:
        asked = asyncio.ensure_future(learner.work_seconds())
        await asyncio.wait([asked], timeout=1.0)
        assert not asked.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    await asked


async def _silences_while_stopped(stack: Stack, learner: int, engine: int, folder: Path) -> list[ProcessSilent]:
    """What heartbeats tell until two processes have been silent for long enough; they are stopped that long."""
    heartbeats = Heartbeats(stack.cluster.probes, "this node")
    silences: list[ProcessSilent] = []
    try:
        os.killpg(engine, signal.SIGSTOP)
        _stop(learner)
        dump_stacks([psutil.Process(learner)], folder)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(_silent_for(silences, SILENT_SECONDS)) < 2 and time.monotonic() < deadline:
            silences += heartbeats.look(time.monotonic())
            await asyncio.sleep(0.25)
    finally:
        os.kill(learner, signal.SIGCONT)
        os.killpg(engine, signal.SIGCONT)
        heartbeats.close()
    return silences


def _stop(pid: int) -> None:
    """The signal is sent at once and obeyed in a moment."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def _silent_for(silences: Sequence[ProcessSilent], seconds: float) -> set[str]:
    return {silent.process for silent in silences if silent.seconds > seconds}
