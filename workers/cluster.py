"""The processes of a run, composed on Ray: learner ranks, engines, router and rollout worker.

    driver ── Ray ─┬─ LearnerRank, one per rank     warm start, steps, weight writes
                   ├─ Engine, one each              one SGLang server each
                   ├─ Router                        sglang-router
                   └─ RolloutWorker                 pipeline/service.py

Leaving the context ends all of them, in every case.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
import structlog
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from miles_async.adapters.ray.actor_errors import death_of
from miles_async.adapters.ray.servers import start_engine
from miles_async.adapters.ray.weights import RaySources
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.router import require_router
from miles_async.adapters.storage.warm_starts import found
from miles_async.adapters.weights.channel import find_transports
from miles_async.config import derived
from miles_async.config.device_plan import Bundle, by_node
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, MilesError, UserError
from miles_async.events import ClusterReady, Event
from miles_async.observability.run_folder import RunFolder

from .engine import Engine
from .heartbeats import Question
from .learner import LearnerRank
from .placement import Placement, beside_the_driver, reserve
from .preflight import SftExamples, checkpoint_to_resume
from .rollout import RolloutWorker, Surroundings
from .router import Router
from .specs import ENVIRONMENT, engine_spec, external_router, ray_arguments, router_spec

LEARNER_SHARE, ENGINE_SHARE = 0.4, 0.2
"""Of a GPU, as Ray counts: both fit on one when they are colocated."""
GOODBYE_SECONDS = 5.0
"""How long servers, and then all processes, may take to end by themselves."""

log = structlog.get_logger(__name__)


class Cluster:
    def __init__(self, config: RunConfig, folder: RunFolder, entry: str) -> None:
        self._config = config
        self._folder = folder
        self._entry = entry
        self._actors: list[ActorHandle[Any]] = []
        self._resume_from = checkpoint_to_resume(config)
        self._engine_actors: dict[str, list[ActorHandle[Any]]] = {}
        """Of each engine, one per node that it spans; the first one's server takes its requests."""
        self._router_actor: ActorHandle[Any] | None = None
        self._daemons: set[psutil.Process] = set()
        """Ray's own processes, where we started them; all actors and servers descend from them."""
        self.questions: dict[str, Question] = {}
        """How to ask each process whether it is there, by its name."""
        self._placements: list[Placement] = []
        """The run's own, and one for each engine that was added since."""
        self._worker: ActorHandle[Any]
        self.surroundings: Surroundings
        """What `start` found and started."""

    @property
    def logs(self) -> Path:
        return self._folder.logs

    async def __aenter__(self) -> Self:
        os.environ |= ENVIRONMENT
        started = time.monotonic()
        others = set(psutil.Process().children())
        try:
            ray.init(**ray_arguments(self._config))
        except Exception as error:  # of a node that does not start, Ray says no more than that
            reason, address = " ".join(str(error).split()), self._config.cluster.ray_address
            if address is None:
                raise FatalError(f"Ray does not start here: {reason} Its logs: /tmp/ray/session_latest/logs") from error
            raise UserError(f"Ray cannot be had at ray_address {address}: {reason}{_advice()}") from error
        self._daemons = set(psutil.Process().children()) - others
        # Ray cannot be told to write anywhere else: sockets lie in the same folder, and their paths may not be long.
        session = ray.get_runtime_context()
        (self.logs / "ray").symlink_to(Path(session.get_temp_dir()) / session.get_session_name() / "logs")
        log.info("ray is up", seconds=round(time.monotonic() - started, 1))
        return self

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes that this one started, on this machine, which run Python."""
        started = psutil.Process().children(recursive=True)
        return [process for process in started if Path(_executable(process)).name.startswith("python")]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ours: list[psutil.Process] = []
        for daemon in self._daemons:
            with suppress(psutil.NoSuchProcess):  # one that died may be what ends the run
                ours += [daemon, *daemon.children(recursive=True)]
        try:
            # Servers first: an actor that is killed cannot say goodbye to its server, only take it along.
            with suppress(TimeoutError):
                servers = [part for parts in self._engine_actors.values() for part in parts]
                servers += [self._router_actor] if self._router_actor else []
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await asyncio.gather(*(server.stop.remote() for server in servers), return_exceptions=True)
        finally:  # whoever presses Ctrl-C meanwhile skips the goodbyes only
            for placement in self._placements:
                placement.give_back()
            ray.shutdown()
            # Ray does not wait for its workers; a busy one lives on for a while.
            for process in psutil.wait_procs(ours, GOODBYE_SECONDS)[1]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    async def start(self, sft_examples: SftExamples) -> ClusterReady:
        """Everything up to the first request. Raises UserError or Fatal with what did not start."""
        debug, idle = self._config.debug, not derived.generates(self._config)
        place = await asyncio.to_thread(reserve, derived.demand_of(self._config))
        self._placements.append(place)
        # Where the model is known, engines start beside the learner: both import for ten seconds, on a core each.
        started = found(self._config, sft_examples.problems, sft_examples.check)
        needed = self._world_size if not debug.debug_rollout_only else 0 if started else 1
        ranks = [
            self._actor(
                LearnerRank,
                f"learner-{rank}",
                self._config,
                rank,
                self._world_size,
                self._folder.path,
                **_of_learner(place, rank),
            )
            for rank in range(needed)
        ]
        self._worker = self._actor(
            RolloutWorker, "rollout", self._config, self._entry, self._folder, **beside_the_driver()
        )
        named = {f"learner-{rank}": ranks[rank] for rank in range(len(ranks))} | {"rollout": self._worker}
        for name, actor in named.items():
            actor.log_to.remote(self.logs, name)  # carried out first, and nobody has to wait for it
        self.questions |= {f"learner-{rank}": ranks[rank].pid.remote for rank in range(len(ranks))}
        self.questions["rollout"] = self._worker.answers.remote
        if started is None:
            started = await _call(ranks[0].warm_start, sft_examples.problems, sft_examples.check)
        log.info("warm start", cached=started.cached, seconds=round(started.seconds, 1), accuracy=started.accuracy)
        router_url, engines, _ = await _together(
            _nothing("") if idle else self._router(),
            _nothing([]) if idle else self._engines(place, started.path),
            _nothing(None) if debug.debug_rollout_only else self._load(place, ranks, started.path),
        )
        transports = ("none",) if idle or debug.debug_rollout_only else await self._connect(ranks, engines)
        self.surroundings = Surroundings(
            checkpoint=started.path,
            router_url=router_url,
            engines=engines,
            engine_actors=self._engine_actors,
            router_actor=self._router_actor,
            learner_ranks=ranks,
            weight_transports=transports,
            resume_from=self._resume_from,
        )
        return ClusterReady(
            time=time.time(),
            weight_transfer=transports[0],
            warm_start_seconds=started.seconds,
            warm_start_cached=started.cached,
        )

    async def run(self) -> None:
        """The run itself. Raises what ended it."""
        await _call(self._worker.run, self.surroundings)

    async def events(self) -> list[Event]:
        """What happened since the last call; waits up to half a second for something to happen."""
        return await _call(self._worker.events)

    def stop(self) -> None:
        """End the run after the step being taken. Nobody waits for the answer: the rollout worker may hang."""
        self._worker.stop.remote()

    async def resize(self, engines: int) -> None:
        """Add or remove engines until there are so many; the run goes on meanwhile.

        Raises UserError where there is no room for another one.
        """
        alone = replace(derived.demand_of(self._config), learner=0, engines=1, colocated=False)
        while len(self._engine_actors) < engines:
            place = await asyncio.to_thread(reserve, alone)
            self._placements.append(place)
            name = f"engine-{len(self._engine_actors)}"
            parts = self._engine_parts(place, name, place.plan.engines[0], self.surroundings.checkpoint)
            self._engine_actors[name] = parts
            await _call(self._worker.add_engine, name, parts)
            log.info("engine is being added", engine=name)
        while len(self._engine_actors) > engines:
            name, parts = self._engine_actors.popitem()
            for rank in range(len(parts)):
                del self.questions[_part(name, rank)]
            await _call(self._worker.remove_engine, name)
            for part in parts:
                await _call(part.stop)
                ray.kill(part)
            log.info("engine was removed", engine=name)

    @property
    def _world_size(self) -> int:
        return derived.learner_ranks(self._config)

    def _actor(self, kind: type[Any], name: str, *arguments: Any, **options: Any) -> ActorHandle[Any]:
        """An actor that takes no cores of its own: on a CPU machine they are shared, and pinned where asked for."""
        return ray.remote(kind).options(name=name, **options).remote(*arguments)

    def _server(self, kind: type[Any], name: str, spec: Any, options: Mapping[str, Any]) -> ActorHandle[Any]:
        """Several calls at once, so that it can be stopped, and asked whether it answers, while it starts.

        Ray starts its process anew when it dies.
        """
        server = self._actor(kind, name, spec, max_concurrency=4, max_restarts=-1, **options)
        self.questions[name] = server.answers.remote
        return server

    async def _load(self, place: Placement, ranks: Sequence[ActorHandle[Any]], checkpoint: str) -> None:
        host = place.host(place.plan.learner[0])
        port = await _call(ranks[0].claim_port, host)
        await _together(*(_call(rank.start, checkpoint, host, port) for rank in ranks))
        if self._resume_from is not None:
            await _together(*(_call(rank.load_state, str(self._resume_from)) for rank in ranks))
            log.info("learner resumes", checkpoint=str(self._resume_from))
        log.info("learner is up", ranks=len(ranks))

    async def _router(self) -> str:
        if (theirs := external_router(self._config)) is not None:
            await asyncio.to_thread(require_router, theirs)
            log.info("the router is somebody else's", url=theirs)
            return theirs
        spec = router_spec(self._config, self.logs)
        self._router_actor = self._server(Router, "router", spec, beside_the_driver())
        url: str = await _call(self._router_actor.start)
        log.info("router is up", url=url, metrics=await _call(self._router_actor.metrics_url))
        return url

    async def _engines(self, place: Placement, checkpoint: str) -> list[EngineInfo]:
        names = [f"engine-{number}" for number in range(len(place.plan.engines))]
        for name, bundles in zip(names, place.plan.engines, strict=True):
            self._engine_actors[name] = self._engine_parts(place, name, bundles, checkpoint)
        return await _together(*map(self._engine, names))

    def _engine_parts(
        self, place: Placement, name: str, bundles: Sequence[Bundle], checkpoint: str
    ) -> list[ActorHandle[Any]]:
        """The actors of one engine, their servers not started."""
        nodes, parts = by_node(bundles), []
        for rank, there in enumerate(nodes):
            spec = engine_spec(
                self._config,
                name,
                checkpoint,
                self.logs,
                host=place.host(there[0]),
                devices=place.devices(there),
                nodes=len(nodes),
                node_rank=rank,
            )
            options = place.on(there[0], ENGINE_SHARE)
            parts.append(self._server(Engine, _part(name, rank), spec, options))
        return parts

    async def _engine(self, name: str) -> EngineInfo:
        began = time.monotonic()
        info = await _outcome(start_engine(self._engine_actors[name]))
        log.info("engine is up", engine=name, url=info.url, seconds=round(time.monotonic() - began, 1))
        return info

    async def _connect(self, ranks: Sequence[ActorHandle[Any]], engines: Sequence[EngineInfo]) -> Sequence[str]:
        transports = await find_transports(RaySources(ranks), self._config.weights.weight_transfer, engines)
        log.info("weights travel", by=transports[0], engines=len(engines))
        return transports


def _of_learner(place: Placement, rank: int) -> dict[str, Any]:
    """Where a rank goes. A run without a learner borrows an engine's place to make its model."""
    bundle = place.plan.learner[rank] if place.plan.learner else place.plan.engines[0][0]
    return place.on(bundle, LEARNER_SHARE)


def _advice() -> str:
    """Ray shows its token only where told to, and says nothing of it when it is turned away for that."""
    unset = "RAY_AUTH_MODE" not in os.environ
    return "; where that cluster asks for a token, set RAY_AUTH_MODE=token, as it was for `ray start`" if unset else ""


def _part(engine: str, node_rank: int) -> str:
    """The name of the actor that is an engine's part on one node."""
    return engine if node_rank == 0 else f"{engine}-node{node_rank}"


def _executable(process: psutil.Process) -> str:
    try:
        return process.exe()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


async def _call(method: Any, *arguments: Any) -> Any:
    """A remote call whose failure is the failure itself, not Ray's wrapping of it."""
    return await _outcome(method.remote(*arguments))


async def _outcome(call: Any) -> Any:
    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, MilesError):
            raise error.cause from None
        raise FatalError(f"{type(error.cause).__name__}: {error.cause}") from error
    except RayActorError as error:
        raise FatalError(death_of(error)) from error


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all of it; at the first failure the rest is left behind and the failure raised as it is."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _nothing(instead: Any) -> Any:
    """In place of a part of the stack that a debugging run leaves out."""
    return instead
