"""Starts, connects and stops the processes of a run, which are Ray actors.

    driver ── Ray ─┬─ LearnerRank     one per rank: warm start, training steps, sending weights
                   ├─ Engine          one per engine and node: owns one SGLang server
                   ├─ Router          owns sglang-router
                   └─ RolloutWorker   runs the pipeline (pipeline/service.py)

`Cluster` is an async context manager: when the block ends, for whatever reason, all processes are ended.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import psutil
import ray
import structlog
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from miles_async.adapters.ray.actor_errors import actor_result
from miles_async.adapters.ray.isolation import isolated_ray
from miles_async.adapters.ray.learner import RayRanks
from miles_async.adapters.ray.private_files import keep_logs, make_private_folder, protect_token
from miles_async.adapters.ray.servers import end_of_engine, start_engine
from miles_async.adapters.sglang.fleet import StartedEngines
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.router import require_router
from miles_async.adapters.sglang.server_key import new_key
from miles_async.adapters.storage.checkpoints import LoadedCheckpoint
from miles_async.adapters.storage.warm_starts import find_warm_start
from miles_async.adapters.system.run_processes import has_ended, is_stopped, kill_remaining, of_part, raylets_of
from miles_async.adapters.system.sessions import SessionReaper
from miles_async.adapters.weights.channel import find_transports
from miles_async.config.device_plan import Bundle, by_node, check_cards, demand_of
from miles_async.config.generation import generates
from miles_async.config.schema import RunConfig
from miles_async.config.untested import weight_transport
from miles_async.errors import EngineLostError, FatalError, UserError
from miles_async.events import ClusterReady, Event, StartupChanged
from miles_async.observability.console.logging import details_logger
from miles_async.observability.run_folder import RunFolder
from miles_async.pipeline.devices import SharedDevices
from miles_async.pipeline.tasks import TaskSupervisor

from .engine import Engine
from .heartbeats import Heartbeats, Probe
from .learner import LearnerRank
from .learner_ranks import LearnerRanks
from .placement import Placement, on_driver_node, reserve
from .preflight import PreflightResult, check_ray
from .rollout import RolloutWorker
from .rollout_supervisor import RolloutSupervisor
from .router import Router
from .specs import (
    ENVIRONMENT,
    ClusterHandles,
    engine_spec,
    external_router,
    external_router_key,
    ray_arguments,
    router_spec,
)

LEARNER_GPU_FRACTION, ENGINE_GPU_FRACTION = 0.4, 0.2
"""Fractions of a GPU that an actor reserves from Ray; together at most 1, so that colocated actors fit on one GPU."""
SHUTDOWN_SECONDS = 5.0
"""Time limit for servers to stop, and again for processes to end; then processes are killed, or exit by themselves."""
ADDRESS_SECONDS = 5.0
"""The actor of an engine that has not answered by then is stopped, or its node is gone."""
EXIT_SECONDS = 2.0
"""An actor that has not answered by then is busy or gone."""
RAY_CHECK_SECONDS = 2.0
"""Interval between checks of Ray's head node, and time limit of a check."""
OWN_RAY_LOST_SECONDS, JOINED_RAY_LOST_SECONDS = 10.0, 40.0
"""Time without an answer after which the head node of Ray is lost. After 60 seconds, Ray's native code would end this
process. The head node of a joined cluster may be restarted in time; that of a Ray that this run started never is."""
RAYLET_STOPPED_SECONDS = 10.0
"""A raylet that has been stopped (SIGSTOP) for so long is lost: Ray neither starts nor ends a process without it."""

log = structlog.get_logger(__name__)
details = details_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineDevices:
    """The devices of one engine, and the placement that they belong to."""

    placement: Placement
    bundles: Sequence[Bundle]


class Cluster:
    """The processes of one run. Use it as `async with Cluster(...) as cluster`, then call `start` and `run`."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, entry: str, emit: Callable[[Event], None], received: int = 0
    ) -> None:
        """`emit` receives the events of the start. `received` is the last batch of events in the event log."""
        self._config = config
        self._folder = folder
        self._entry = entry
        self._emit = emit
        self._engine_actors: dict[str, list[ActorHandle[Any]]] = {}
        """The actors of each engine, one per node. The server of the first actor receives the requests."""
        self._router_actor: ActorHandle[Any] | None = None
        self._key = new_key()
        """API key of the engines and of the router that this run starts."""
        self._router_key = self._key if external_router(config) is None else external_router_key(config)
        self._reaper: SessionReaper
        """Kills the processes of a Ray that this run started, even if this process is killed."""
        self._ray_folder: Path | None = None
        """The private folder with the sockets and logs of a Ray that this run started."""
        self._ray_is_lost = False
        self.probes: dict[str, Probe] = {}
        """The heartbeat call of each process, by the name of the process (`workers/heartbeats.py`)."""
        self.heartbeats: Heartbeats
        self._actors: list[ActorHandle[Any]] = []
        """All actors that were created, also those that were lost."""
        self._placements: list[Placement] = []
        """The placement of the run, and one for each engine that was added later."""
        self._engine_urls: set[str] = set()
        """URLs that engines of this run have and had. A router must not keep one whose engine was removed."""
        self._engine_devices: dict[str, EngineDevices] = {}
        self._free_devices: list[EngineDevices] = []
        """Devices of removed engines that the learner shares, for engines that are added later."""
        # A lost rollout worker would leave colocated engines and learner in an unknown state.
        max_restarts = 0 if config.cluster.colocate else config.cluster.max_restarts
        self.rollout = RolloutSupervisor(
            self._create_worker,
            lambda: self.heartbeats.wait_for_answer("rollout"),
            _head_node_answers,
            emit,
            max_restarts,
            received,
        )
        self.learner: LearnerRanks
        self.handles: ClusterHandles
        """The processes that `start` started, for the rollout worker."""

    @property
    def logs(self) -> Path:
        return self._folder.logs

    async def __aenter__(self) -> Self:
        os.environ |= ENVIRONMENT
        started = time.monotonic()
        if self._config.cluster.ray_address is None:
            protect_token()
            self._ray_folder = make_private_folder()
            # By default, Ray keeps 3 GiB of each log.
            os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(self._config.observability.log_rotate_bytes))
            os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
        self._reaper = SessionReaper()
        try:
            with self._starting("Ray"), isolated_ray(self._reaper):
                ray.init(**ray_arguments(self._config, self._ray_folder))
        except Exception as error:  # Ray raises different exceptions for different causes
            self._reaper.close(grace=0)
            reason, address = " ".join(str(error).split()), self._config.cluster.ray_address
            if address is None:
                raise FatalError(
                    f"Ray does not start on this machine: {reason} See its logs in {self._ray_folder}"
                ) from error
            raise UserError(f"cannot connect to Ray at ray_address {address}: {reason}{_token_hint()}") from error
        # Ray keeps logs and sockets in one folder, and paths of sockets are limited to 107 bytes. Its folder can
        # therefore not be inside the run folder, which holds a link to the logs instead, and the logs at the end.
        session = ray.get_runtime_context()
        self.heartbeats = Heartbeats(self.probes, session.get_node_id())
        (self.logs / "ray").symlink_to(Path(session.get_temp_dir()) / session.get_session_name() / "logs")
        details.info("ray is up", seconds=round(time.monotonic() - started, 1))
        return self

    @property
    def processes(self) -> list[psutil.Process]:
        """All Python processes on this machine that descend from this process."""
        started = psutil.Process().children(recursive=True)
        return [process for process in started if Path(_executable(process)).name.startswith("python")]

    async def __aexit__(self, *error: object) -> None:
        # Neither the calls below nor Ray end a process that is stopped (SIGSTOP).
        self.heartbeats.kill_stopped(silent=0.0, now=time.monotonic())
        try:
            # Servers are stopped before their actors: an actor that is killed takes its server with it, and the server
            # cannot shut down in an orderly way.
            with suppress(TimeoutError):
                servers = [actor for actors in self._engine_actors.values() for actor in actors]
                servers += [self._router_actor] if self._router_actor else []
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await asyncio.gather(*(server.stop.remote() for server in servers), return_exceptions=True)
        finally:  # a second Ctrl-C interrupts only the orderly shutdown of the servers
            try:
                await self._end_processes()
            finally:
                # A lost head node would block these calls until Ray's native code ends this process.
                if ray_answers := not self._ray_is_lost and _head_node_answers():
                    for actor in self._actors:
                        ray.kill(actor)  # Ray would report a process that ends by itself, and start a server again
                    for placement in self._placements:
                        placement.release()
                _disconnect(ray_answers)
                # A Ray that goes on may have lost the processes: its raylet may be stopped.
                await asyncio.to_thread(kill_remaining, self.heartbeats.local_processes(), EXIT_SECONDS)
                # `ray.shutdown` does not wait for worker processes, and a busy worker would continue for a while.
                self._reaper.close(SHUTDOWN_SECONDS)
                if self._ray_folder is not None:
                    await asyncio.to_thread(keep_logs, self._ray_folder, self.logs / "ray")

    async def _end_processes(self) -> None:
        """Let the processes of all actors exit after `SHUTDOWN_SECONDS` if Ray does not end them before.

        Ray ends no process while the raylet of its node or the head node is stopped. The call needs neither of them.
        """
        calls = [actor.__ray_call__.remote(_exit_later) for actor in self._actors]
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                await asyncio.gather(*calls, return_exceptions=True)

    async def start(self, checked: PreflightResult) -> ClusterReady:
        """Start and connect all processes. Raises UserError or FatalError if one of them does not start."""
        beginning = checked.beginning
        debug, idle = self._config.debug, not generates(self._config)
        placement = await asyncio.to_thread(reserve, demand_of(self._config))
        self._placements.append(placement)
        check_cards(placement.plan, self._config)
        # If the checkpoint does not exist yet, the first learner rank runs the warm start first.
        started = find_warm_start(self._config, checked.problems, checked.check)
        # A run without a learner needs one rank for a warm start, and none if the checkpoint exists.
        needed = None if not debug.debug_rollout_only else 0 if started else 1

        def create_rank(rank: int, name: str) -> ActorHandle[Any]:
            options = placement.actor_options(_learner_device(placement, rank), LEARNER_GPU_FRACTION)
            world_size = self._config.learner.ranks
            actor = self._actor(LearnerRank, name, self._config, rank, world_size, self._folder.path, **options)
            # Ray executes the calls to an actor in order: no need to wait.
            actor.log_to.remote(self.logs, name)
            self.probes[f"learner-{rank}"] = actor.heartbeat.remote
            return actor

        host = placement.host(_learner_device(placement, 0))
        self.learner = LearnerRanks(self._config, self._folder.path.name, create_rank, host)
        self.learner.create(needed)
        self.rollout.start()
        if started is None:
            with self._starting("warm start"):
                started = await _call(self.learner.actors[0].warm_start, checked.problems, checked.check)
        details.info("warm start", cached=started.cached, seconds=round(started.seconds, 1), accuracy=started.accuracy)
        if not idle:
            # An error is raised again when the run opens its data and its tokenizer.
            self.rollout.current.import_libraries.remote(started.path)
        router_url, engines = await self._start_servers_and_learner(placement, started.path, beginning.starts_from)
        transports = ("none",) if idle or debug.debug_rollout_only else await self._connect(engines)
        if not debug.debug_rollout_only:
            await self.learner.begin()
        self.handles = ClusterHandles(
            checkpoint=started.path,
            router_url=router_url,
            router_key=self._router_key,
            engines=engines,
            engine_urls=(),
            engine_actors=self._engine_actors,
            router_actor=self._router_actor,
            learner_ranks=self.learner.actors,
            weight_transports=transports,
            began_with=beginning.began_with,
            learner_checkpoint=beginning.starts_from,
        )
        return ClusterReady(
            time=time.time(),
            weight_transfer=transports[0],
            warm_start_seconds=started.seconds,
            warm_start_cached=started.cached,
        )

    async def run(self) -> None:
        """Run the pipeline to its end. Raises the error that ended it."""
        await self.rollout.run(self._current_handles, self.learner.death, self._replace_learner)

    async def _replace_learner(self) -> None:
        """Start another learner from the last checkpoint. Raises FatalError if the run writes no checkpoints."""
        if not self._config.restarts_learner:
            raise FatalError(
                f"{await self.learner.death()}. The run cannot continue without its learner. With --save and "
                "--save-interval, a run that is not colocated continues from its last checkpoint"
            )
        before, limit = self.handles, self._config.observability.no_progress_abort_seconds
        try:
            checkpoint = await self.learner.replace(before.checkpoint, before.began_with, limit)
        except TimeoutError:
            raise FatalError(
                f"the replacement of the learner does not start: it has not advanced for {limit:.0f} s "
                f"(--no-progress-abort-seconds); its node or its devices may be gone; see `ray status` and {self.logs}"
            ) from None
        self.handles = replace(before, learner_ranks=self.learner.actors, learner_checkpoint=checkpoint)

    async def _current_handles(self) -> ClusterHandles:
        """The handles, with the engines that have a server now: some may have been added or restarted."""
        found = await _gather(*(self._address_of(*engine) for engine in self._engine_actors.items()))
        # An engine may have been removed meanwhile.
        engines = [info for info in found if info is not None and info.name in self._engine_actors]
        self._engine_urls |= {info.url for info in engines}
        self.handles = replace(
            self.handles,
            engines=engines,
            engine_urls=frozenset(self._engine_urls),
            engine_actors=dict(self._engine_actors),
        )
        return self.handles

    async def _address_of(self, engine: str, actors: Sequence[ActorHandle[Any]]) -> EngineInfo | None:
        """The current address of an engine, or its last one if its actor does not answer; None if it has no server."""
        with suppress(FatalError):
            try:
                async with asyncio.timeout(ADDRESS_SECONDS):
                    info: EngineInfo = await _call(actors[0].info)
                return info
            except TimeoutError:
                return next((last for last in self.handles.engines if last.name == engine), None)
        return None

    def _create_worker(self, name: str) -> ActorHandle[Any]:
        worker = self._actor(RolloutWorker, name, self._config, self._entry, self._folder, **on_driver_node())
        worker.log_to.remote(self.logs, name)
        self.probes["rollout"] = worker.heartbeat.remote
        return worker

    async def watch_ray(self) -> NoReturn:
        """Raise FatalError if the head node of Ray (its GCS process) does not answer, or the run's raylet is lost.

        A raylet is lost if its process has ended, or is stopped (SIGSTOP) for some time.
        """
        address = ray.get_runtime_context().gcs_address
        limit = OWN_RAY_LOST_SECONDS if self._config.cluster.ray_address is None else JOINED_RAY_LOST_SECONDS
        # The raylet of a Ray that this run started is a child of this process. Another one is known when the first
        # actor has answered.
        raylets = of_part("raylet", psutil.Process().children())
        answered = ran = time.monotonic()
        while (silence := time.monotonic() - answered) < limit:
            await asyncio.sleep(RAY_CHECK_SECONDS)
            raylets = raylets or raylets_of(self.heartbeats.local_processes())
            if any(map(has_ended, raylets)):
                self._ray_is_lost = True
                raise FatalError(
                    "the raylet of Ray was killed (out of memory?) or crashed, and the processes of the run ended; "
                    f"see raylet.out in {self.logs / 'ray'}"
                )
            if not any(map(is_stopped, raylets)):
                ran = time.monotonic()
            elif time.monotonic() - ran >= RAYLET_STOPPED_SECONDS:
                self._ray_is_lost = True
                raise FatalError(
                    f"the raylet of Ray has been stopped (SIGSTOP) for {RAYLET_STOPPED_SECONDS:.0f} s, and no process "
                    "of the run can be replaced without it: resume the run, and find out what stopped the process"
                )
            with suppress(UserError):
                await asyncio.to_thread(check_ray, address, RAY_CHECK_SECONDS)
                answered = time.monotonic()
        self._ray_is_lost = True
        raise FatalError(
            f"the head node of Ray at {address} has not answered for {silence:.0f} s, and no run can continue without "
            f"it; see gcs_server.out in {self.logs / 'ray'}"
        )

    async def resize(self, engines: int) -> None:
        """Add or remove engines until the run has `engines` of them. The run continues meanwhile.

        Raises UserError if the Ray cluster has no free devices for another engine.
        """
        while len(self._engine_actors) < engines:
            devices = self._free_devices.pop() if self._free_devices else await self._reserve_engine()
            name = self._create_engine(devices, self.handles.checkpoint)
            await _unless_lost(self.rollout.current.add_engine.remote(name, self._engine_actors[name]))
            log.info("engine is being added", engine=name)
        while len(self._engine_actors) > engines:
            name, actors = list(self._engine_actors.items())[-1]
            if (info := await self._address_of(name, actors)) is not None:
                self._engine_urls.add(info.url)
            del self._engine_actors[name]
            for rank in range(len(actors)):
                del self.probes[_actor_name(name, rank)]
            await _unless_lost(self.rollout.current.remove_engine.remote(name))
            for actor in actors:
                with suppress(FatalError):  # the actor may have died already
                    await _call(actor.stop)
                ray.kill(actor)
            self._return_devices(self._engine_devices.pop(name))
            log.info("engine was removed", engine=name)

    async def _reserve_engine(self) -> EngineDevices:
        """Reserve the devices of another engine. Raises UserError if the Ray cluster has none that are free."""
        one_engine = replace(demand_of(self._config), learner=0, engines=1, colocated=False)
        placement = await asyncio.to_thread(reserve, one_engine)
        if not self._placements[0].local:
            # The learner on another node must reach the engine, so the engine must not listen on loopback.
            placement = replace(placement, local=False)
        self._placements.append(placement)
        return EngineDevices(placement, placement.plan.engines[0])

    def _return_devices(self, devices: EngineDevices) -> None:
        """Give the devices of a removed engine back to Ray. Devices that the learner shares are kept."""
        if demand_of(self._config).colocated and devices.placement is self._placements[0]:
            self._free_devices.append(devices)
        else:
            devices.placement.release_engine(devices.bundles)

    @contextmanager
    def _starting(self, part: str) -> Iterator[None]:
        """Report that a part of the run is being started inside the block, and ready at its end."""
        began = time.monotonic()
        self._emit(StartupChanged(time=time.time(), part=part, seconds=None))
        yield
        self._emit(StartupChanged(time=time.time(), part=part, seconds=time.monotonic() - began))

    def _actor(self, kind: type[Any], name: str, *arguments: Any, **options: Any) -> ActorHandle[Any]:
        """Create an actor. `options` are those of Ray, for example from `Placement.actor_options`."""
        actor: ActorHandle[Any] = ray.remote(kind).options(name=name, **options).remote(*arguments)
        self._actors.append(actor)
        return actor

    def _server(self, kind: type[Any], name: str, spec: Any, options: Mapping[str, Any]) -> ActorHandle[Any]:
        """Create an actor that owns a server.

        The actor accepts several calls at once, so that heartbeats and `stop` work while the server starts. Ray
        restarts the process of the actor if it dies.
        """
        server = self._actor(kind, name, spec, max_concurrency=4, max_restarts=-1, **options)
        self.probes[name] = server.heartbeat.remote
        return server

    async def _start_servers_and_learner(
        self, placement: Placement, model: str, checkpoint: LoadedCheckpoint | None
    ) -> tuple[str, Sequence[EngineInfo]]:
        """Start router, engines and learner at the same time; return the URL of the router, and the engines.

        Engines that share devices with the learner start first: SGLang divides the memory that is free. They release it
        before the learner loads its weights.
        """

        async def start_servers() -> tuple[str, Sequence[EngineInfo]]:
            if not generates(self._config):
                return "", ()
            url, engines = await _gather(self._start_router(), self._start_engines(placement, model))
            return url, engines

        async def start_learner() -> None:
            if not self._config.debug.debug_rollout_only:
                await self._start_learner(model, checkpoint)

        if not self._config.cluster.colocate:
            (url, engines), _ = await _gather(start_servers(), start_learner())
            return url, engines
        self.learner.import_libraries()
        url, engines = await start_servers()
        async with self._explained():
            await StartedEngines(engines).offload()
        await start_learner()
        return url, engines

    async def _start_learner(self, model: str, checkpoint: LoadedCheckpoint | None) -> None:
        with self._starting("learner"):
            await self.learner.start(model, checkpoint)
        details.info("learner is up", ranks=len(self.learner.actors))

    async def _start_router(self) -> str:
        if (url := external_router(self._config)) is not None:
            await asyncio.to_thread(require_router, url, self._router_key)
            log.info("using an external router", url=url)
            return url
        spec = router_spec(self._config, self.logs, self._router_key)
        self._router_actor = self._server(Router, "router", spec, on_driver_node())
        with self._starting("router"):
            url = await _call(self._router_actor.start)
        details.info("router is up", url=url, metrics=await _call(self._router_actor.metrics_url))
        return url

    async def _start_engines(self, placement: Placement, checkpoint: str) -> list[EngineInfo]:
        devices = [EngineDevices(placement, bundles) for bundles in placement.plan.engines]
        names = [self._create_engine(one, checkpoint) for one in devices]
        return await _gather(*map(self._start_engine, names))

    def _create_engine(self, devices: EngineDevices, checkpoint: str) -> str:
        """Create the actors of a further engine, one per node, without starting their servers. Returns its name."""
        number = len(self._engine_actors)
        name = f"engine-{number}"
        self._engine_devices[name] = devices
        placement = devices.placement
        nodes, actors = by_node(devices.bundles), []
        for rank, node_bundles in enumerate(nodes):
            spec = engine_spec(
                self._config,
                name,
                checkpoint,
                self.logs,
                host=placement.host(node_bundles[0]),
                devices=placement.devices(node_bundles),
                nodes=len(nodes),
                node_rank=rank,
                number=number,
                key=self._key,
            )
            options = placement.actor_options(node_bundles[0], ENGINE_GPU_FRACTION)
            actors.append(self._server(Engine, _actor_name(name, rank), spec, options))
        self._engine_actors[name] = actors
        return name

    async def _start_engine(self, name: str) -> EngineInfo:
        began = time.monotonic()
        with self._starting(name):
            info = await actor_result(start_engine(self._engine_actors[name]))
        details.info("engine is up", engine=name, url=info.url, seconds=round(time.monotonic() - began, 1))
        return info

    async def _connect(self, engines: Sequence[EngineInfo]) -> Sequence[str]:
        ranks = RayRanks(self.learner.actors)
        wanted = weight_transport(self._config, on_gpus=self._placements[0].unit == "GPU")
        devices = SharedDevices(self.learner, StartedEngines(engines), colocated=self._config.cluster.colocate)
        await devices.begin()
        async with self._explained():
            first = next(iter(self._config.data.adapter_weights))
            transports = await find_transports(ranks, wanted, engines, devices, first)
        details.info("weight transport chosen", transport=transports[0], engines=len(engines))
        return transports

    @asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        """If an engine is lost inside the block because its server has ended, raise FatalError with the cause."""
        try:
            yield
        except EngineLostError as lost:
            ends = await asyncio.gather(*map(end_of_engine, self._engine_actors.values()))
            for engine, end in zip(self._engine_actors, ends, strict=True):
                if end is not None:
                    raise FatalError(f"engine {engine} does not work: {end}") from lost
            raise


def _learner_device(placement: Placement, rank: int) -> Bundle:
    """Return the device of a learner rank.

    A run without a learner runs its warm start on the first device of the first engine.
    """
    plan = placement.plan
    return plan.learner[rank] if plan.learner else plan.engines[0][0]


def _head_node_answers() -> bool:
    """Return whether the head node of Ray answers. It may be lost, or stopped, only since the last check of it."""
    with suppress(UserError):
        check_ray(ray.get_runtime_context().gcs_address, RAY_CHECK_SECONDS)
        return True
    return False


def _exit_later(actor: object) -> None:
    """End the process of an actor if it still runs after `SHUTDOWN_SECONDS`."""
    exit_later = threading.Timer(SHUTDOWN_SECONDS, os._exit, [0])
    exit_later.daemon = True
    exit_later.start()


def _disconnect(ray_answers: bool) -> None:
    """Disconnect from Ray. Gives up after `SHUTDOWN_SECONDS`.

    Without an answer of the raylet, for example if it is stopped (SIGSTOP), `ray.shutdown` would block forever. Without
    an answer of the head node, it may crash.
    """
    if ray_answers:
        disconnecting = threading.Thread(target=ray.shutdown, name="disconnect-from-ray", daemon=True)
        disconnecting.start()
        disconnecting.join(SHUTDOWN_SECONDS)
        if not disconnecting.is_alive():
            return
    log.warning("Ray does not answer, so the run ends without disconnecting from it")
    atexit.unregister(ray.shutdown)


def _token_hint() -> str:
    """Return a hint for clusters with token authentication: the error that Ray raises does not mention the token."""
    unset = "RAY_AUTH_MODE" not in os.environ
    return "; if the cluster requires a token, set RAY_AUTH_MODE=token, as for `ray start`" if unset else ""


def _actor_name(engine: str, node_rank: int) -> str:
    return engine if node_rank == 0 else f"{engine}-node{node_rank}"


def _executable(process: psutil.Process) -> str:
    try:
        return process.exe()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


async def _call(method: Any, *arguments: Any) -> Any:
    return await actor_result(method.remote(*arguments))


async def _unless_lost(call: Awaitable[Any]) -> None:
    """Await a call to the rollout worker. If the worker is lost, the next one begins with the engines of that moment.

    Raises FatalError for any other failure.
    """
    try:
        await actor_result(call)
    except FatalError as error:
        if not isinstance(error.__cause__, RayActorError):
            raise


async def _gather(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return the results of all coroutines. If one of them raises, the others are cancelled and its error is raised."""
    async with TaskSupervisor() as tasks:
        running = [tasks.spawn("start", coroutine) for coroutine in coroutines]
        return [await task for task in running]
