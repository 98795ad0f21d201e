"""What the cluster does about a lost head node of Ray, and with the devices of removed engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event as ThreadEvent
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from structlog.testing import capture_logs

from miles_async.adapters.ray.servers import RayServers
from miles_async.adapters.sglang.fleet import SGLangFleet, StartedEngines
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.config.device_plan import Bundle
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, UserError
from miles_async.events import Event, StartupChanged
from miles_async.observability.run_folder import RunFolder
from tests.configuration import run_config
from workers import cluster as module
from workers.cluster import Cluster, EngineDevices
from workers.heartbeats import Heartbeats
from workers.rollout import RolloutWorker
from workers.specs import ClusterHandles


@dataclass
class Placement:
    """Devices for one engine."""

    plan: Any = field(default_factory=lambda: SimpleNamespace(engines=[[Bundle(0, "127.0.0.1", 0)]]))
    local: bool = True
    released: bool = False

    def release_engine(self, bundles: Any) -> None:
        self.released = True


class Actor:
    """Answers every call of every method."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=self._answer)

    async def _answer(self, *arguments: Any) -> None: ...


def handles_with(*engines: EngineInfo) -> ClusterHandles:
    return ClusterHandles(
        checkpoint="",
        router_url="",
        router_key="",
        engines=engines,
        engine_urls=(),
        engine_actors={},
        router_actor=None,
        learner_ranks=[],
        weight_transports=[],
        began_with=None,
        learner_checkpoint=None,
    )


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A running cluster with one engine, whose actors do nothing."""
    return started(RunConfig(), tmp_path, monkeypatch)


def started(config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(config, RunFolder(folder), "train_async.py", lambda event: None)
    created: Any = Placement()
    faked: Any = made
    faked.rollout.current = Actor()
    faked.handles = SimpleNamespace(checkpoint="")
    made.heartbeats = Heartbeats(made.probes, "this node")
    probes: Any = made.probes
    monkeypatch.setattr(made, "_server", lambda kind, name, *rest: probes.setdefault(name, Actor()))
    monkeypatch.setattr(module, "engine_spec", lambda *arguments, **settings: None)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    for method in ("host", "devices", "actor_options"):
        monkeypatch.setattr(Placement, method, lambda self, *arguments: None, raising=False)
    made._placements.append(created)
    devices = EngineDevices(created, created.plan.engines[0])
    made._create_engine(devices, "")
    return made


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[Placement]:
    """All placements that were reserved for further engines."""
    made: list[Placement] = []

    def reserve(demand: Any) -> Placement:
        made.append(Placement())
        return made[-1]

    monkeypatch.setattr(module, "reserve", reserve)
    return made


def test_the_devices_of_an_added_engine_are_given_back_when_it_is_removed(
    cluster: Cluster, reserved: list[Placement]
) -> None:
    async def resize() -> None:
        await cluster.resize(3)
        await cluster.resize(2)

    asyncio.run(resize())
    assert [placement.released for placement in reserved] == [False, True]


def test_the_devices_of_an_engine_that_the_run_started_with_are_given_back_when_it_is_removed(
    cluster: Cluster, reserved: list[Placement]
) -> None:
    initial: Any = cluster._placements[0]
    asyncio.run(cluster.resize(0))
    assert initial.released
    asyncio.run(cluster.resize(1))
    assert len(reserved) == 1


def test_the_devices_of_a_colocated_engine_stay_with_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserved: list[Placement]
) -> None:
    cluster = started(run_config(colocate=True), tmp_path, monkeypatch)
    initial: Any = cluster._placements[0]

    async def resize() -> None:
        await cluster.resize(0)
        await cluster.resize(1)

    asyncio.run(resize())
    assert (initial.released, reserved) == (False, [])


def start_of(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, begins: Callable[[str], Awaitable[Any]]) -> list[str]:
    """Starts engines and learner; returns what happened. `begins` is awaited while each of the two starts."""
    happened: list[str] = []

    async def start(what: str, result: Any) -> Any:
        happened.append(f"{what} starts")
        await begins(what)
        happened.append(f"{what} is up")
        return result

    async def release(self: StartedEngines) -> None:
        happened.append("engine releases its devices")

    async def router() -> str:
        return "http://router"

    faked: Any = cluster
    faked.learner = SimpleNamespace(import_libraries=lambda: None)
    monkeypatch.setattr(cluster, "_start_router", router)
    monkeypatch.setattr(cluster, "_start_engines", lambda *arguments: start("engine", []))
    monkeypatch.setattr(cluster, "_start_learner", lambda *arguments: start("learner", None))
    monkeypatch.setattr(StartedEngines, "offload", release)
    placement: Any = None
    assert asyncio.run(cluster._start_servers_and_learner(placement, "", None)) == ("http://router", [])
    return happened


def test_a_learner_loads_when_the_engines_with_which_it_shares_devices_have_released_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = started(run_config(colocate=True), tmp_path, monkeypatch)
    assert start_of(cluster, monkeypatch, lambda what: asyncio.sleep(0)) == [
        "engine starts",
        "engine is up",
        "engine releases its devices",
        "learner starts",
        "learner is up",
    ]


def test_a_learner_with_devices_of_its_own_starts_while_the_engines_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = asyncio.Barrier(2)
    happened = start_of(cluster, monkeypatch, lambda what: both.wait())
    assert sorted(happened[:2]) == ["engine starts", "learner starts"]
    assert "engine releases its devices" not in happened


def test_an_added_engine_listens_on_loopback_only_if_the_whole_run_is_on_the_drivers_node(
    cluster: Cluster, reserved: list[Placement]
) -> None:
    initial: Any = cluster._placements[0]
    initial.local = False
    asyncio.run(cluster.resize(2))
    assert not cluster._engine_devices["engine-1"].placement.local


def test_a_lost_ray_head_node_ends_the_run_with_an_error_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str, within: float) -> None:
        raise UserError("connection refused")

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(module, "check_ray", refuse)
    monkeypatch.setattr(module, "RAY_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(module, "OWN_RAY_LOST_SECONDS", 0.0)
    with pytest.raises(FatalError, match=r"head node of Ray at 127\.0\.0\.1:6379 has not answered"):
        asyncio.run(cluster.watch_ray())


def test_a_raylet_that_stays_stopped_ends_the_run_with_an_error_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(module, "check_ray", lambda address, within: None)
    monkeypatch.setattr(module, "of_part", lambda part, processes: ["the raylet"])
    monkeypatch.setattr(module, "has_ended", lambda process: False)
    monkeypatch.setattr(module, "is_stopped", lambda process: True)
    monkeypatch.setattr(module, "RAY_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(module, "RAYLET_STOPPED_SECONDS", 0.1)
    with pytest.raises(FatalError, match=r"raylet of Ray has been stopped \(SIGSTOP\)"):
        asyncio.run(cluster.watch_ray())


def test_a_run_without_checkpoints_says_what_it_needs_to_survive_the_loss_of_its_learner(cluster: Cluster) -> None:
    async def death() -> str:
        return "learner-0 died"

    learner: Any = SimpleNamespace(death=death)
    cluster.learner = learner
    with pytest.raises(
        FatalError, match=r"learner-0 died\. .*With --save and --save-interval, a run .* continues from"
    ):
        asyncio.run(cluster._replace_learner())


def test_the_last_address_of_an_engine_is_used_if_its_actor_does_not_answer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server may go on while the actor is stopped (SIGSTOP), and another rollout worker must not wait for it."""
    last = EngineInfo("engine-0", "http://127.0.0.1:1", pid=1, tp=1)
    monkeypatch.setattr(module, "ADDRESS_SECONDS", 0.01)
    stopped: Any = SimpleNamespace(info=SimpleNamespace(remote=asyncio.Event().wait))
    cluster._engine_actors["engine-0"] = [stopped]
    cluster.handles = handles_with(last)
    assert asyncio.run(cluster._current_handles()).engines == [last]


class LostWorker:
    """A rollout worker that has died."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=self._answer)

    async def _answer(self, *arguments: Any) -> None:
        raise RayActorError


class EngineActor(Actor):
    """An engine with a server."""

    def __init__(self, name: str, port: int) -> None:
        self.started = EngineInfo(name, f"http://127.0.0.1:{port}", pid=1, tp=1)
        self.stopped = False
        self.info = SimpleNamespace(remote=self._info)
        self.stop = SimpleNamespace(remote=self._stop)

    async def _info(self) -> EngineInfo:
        return self.started

    async def _stop(self) -> None:
        self.stopped = True


def with_engines(cluster: Cluster) -> dict[str, EngineActor]:
    """Let the cluster have two engines whose servers run."""
    actors = {f"engine-{number}": EngineActor(f"engine-{number}", number) for number in range(2)}
    faked: Any = cluster
    faked._engine_actors = {name: [actor] for name, actor in actors.items()}
    faked._engine_devices = dict.fromkeys(actors, *faked._engine_devices.values())
    faked.probes |= {name: Actor() for name in actors}
    faked.handles = handles_with()
    return actors


def test_an_engine_that_is_removed_while_the_rollout_worker_dies_ends_and_leaves_the_router(
    cluster: Cluster,
) -> None:
    actors = with_engines(cluster)
    faked: Any = cluster
    faked.rollout.current = LostWorker()
    asyncio.run(cluster.resize(1))
    assert [actor.stopped for actor in actors.values()] == [False, True]
    following = asyncio.run(cluster._current_handles())
    assert [info.name for info in following.engines] == [*following.engine_actors] == ["engine-0"]
    assert set(following.engine_urls) == {"http://127.0.0.1:0", "http://127.0.0.1:1"}


def test_an_engine_that_is_added_while_the_rollout_worker_dies_belongs_to_the_next_one(
    cluster: Cluster, reserved: list[Placement]
) -> None:
    faked: Any = cluster
    faked.rollout.current = LostWorker()
    asyncio.run(cluster.resize(3))
    assert [*cluster._engine_actors] == ["engine-0", "engine-1", "engine-2"]
    assert len(reserved) == 2


def test_an_engine_that_is_removed_while_another_rollout_worker_starts_is_unknown_to_it(cluster: Cluster) -> None:
    actors = with_engines(cluster)

    async def remove_last() -> EngineInfo:
        cluster._engine_actors.pop("engine-1", None)
        return actors["engine-0"].started

    actors["engine-0"].info = SimpleNamespace(remote=remove_last)
    following = asyncio.run(cluster._current_handles())
    assert [info.name for info in following.engines] == [*following.engine_actors] == ["engine-0"]


async def test_a_rollout_worker_that_starts_changes_its_engines_when_it_serves(tmp_path: Path) -> None:
    removed: list[str] = []

    async def remove_engine(name: str) -> None:
        removed.append(name)

    worker: Any = RolloutWorker(RunConfig(), "train_async.py", RunFolder(tmp_path))
    adding = asyncio.ensure_future(worker.add_engine("engine-2", ["the actor"]))
    removing = [asyncio.ensure_future(worker.remove_engine(name)) for name in ("engine-1", "unknown")]
    await asyncio.sleep(0)
    assert not any(call.done() for call in (adding, *removing))
    worker._servers = RayServers({}, None, "", start_timeout=1.0)
    worker._fleet = SGLangFleet("http://127.0.0.1:1")
    for name in ("engine-0", "engine-1"):
        worker._fleet.expect_engine(name)
    worker._service = SimpleNamespace(remove_engine=remove_engine)
    worker._serves.set()
    await asyncio.gather(adding, *removing)
    await worker.add_engine("engine-0", ["the actor"])
    assert removed == ["engine-1"]
    assert worker._fleet.members() == ("engine-0", "engine-1", "engine-2")
    await worker._fleet.close()


def test_a_run_ends_although_ray_does_not_answer_when_it_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = ThreadEvent()
    monkeypatch.setattr(ray, "shutdown", answered.wait)
    monkeypatch.setattr(module, "SHUTDOWN_SECONDS", 0.1)
    with capture_logs() as logs:
        module._disconnect(ray_answers=True)
    [line] = logs
    assert "does not answer" in line["event"]
    answered.set()


def test_a_run_does_not_disconnect_from_a_head_node_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's native code might crash, before the run has said why it ends."""
    calls: list[str] = []
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    module._disconnect(ray_answers=False)
    assert calls == []


def test_the_processes_of_actors_are_asked_to_exit_although_ray_does_not_answer(cluster: Cluster) -> None:
    asked: list[Any] = []

    async def call(function: Any) -> None:
        asked.append(function)

    async def gone(function: Any) -> None:
        raise RayActorError

    faked: Any = cluster
    faked._actors = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote)) for remote in (gone, call)]
    asyncio.run(cluster._end_processes())
    assert asked == [module._exit_later]


@pytest.mark.parametrize("answers", [True, False])
def test_the_devices_are_released_at_the_end_of_a_run_only_if_the_head_node_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    def check(address: str, within: float) -> None:
        if not answers:
            raise UserError("connection refused")

    released: list[str] = []
    faked: Any = cluster
    faked._placements = [SimpleNamespace(release=lambda: released.append("all"))]
    faked._engine_actors = {}
    faked._reaper = SimpleNamespace(close=lambda grace: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(module, "check_ray", check)
    asyncio.run(cluster.__aexit__(None, None, None))
    assert released == (["all"] if answers else [])


def test_the_start_of_a_part_is_reported_when_it_begins_and_when_the_part_is_ready(tmp_path: Path) -> None:
    reported: list[Event] = []
    cluster = Cluster(RunConfig(), RunFolder(tmp_path), "train_async.py", reported.append)
    with cluster._starting("learner"):
        (begun,) = reported
    with pytest.raises(FatalError), cluster._starting("engine-0"):
        raise FatalError("the engine does not start")
    [_, ready, failing] = reported
    assert isinstance(begun, StartupChanged)
    assert isinstance(ready, StartupChanged)
    assert isinstance(failing, StartupChanged)
    assert (begun.part, begun.seconds) == ("learner", None)
    assert ready.part == "learner"
    assert ready.seconds is not None
    assert (failing.part, failing.seconds) == ("engine-0", None)
