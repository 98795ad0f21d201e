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
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil
import ray
import structlog
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.process import free_port
from miles_async.config import derived
from miles_async.config.schema import RunConfig
from miles_async.errors import Fatal, MilesError
from miles_async.observability.events import ClusterReady, Event
from miles_async.observability.run_folder import RunFolder
from workers.engine import Engine
from workers.heartbeats import Question
from workers.learner import LearnerRank
from workers.preflight import Lessons, checkpoint_to_resume
from workers.rollout import RolloutWorker, Surroundings
from workers.router import Router
from workers.specs import engine_spec, ray_arguments, router_spec

if TYPE_CHECKING:
    from miles_async.adapters.megatron.warm_start import WarmStarted

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Nothing may look outside this machine."""
GOODBYE_SECONDS = 5.0
"""How long servers, and then all processes, may take to end by themselves."""

log = structlog.get_logger(__name__)


class Cluster:
    def __init__(self, config: RunConfig, folder: RunFolder, entry: str) -> None:
        self._config = config
        self._folder = folder
        self._entry = entry
        self._actors: list[ActorHandle] = []
        self._resume_from = checkpoint_to_resume(config)
        self._servers: list[ActorHandle] = []
        self._daemons: set[psutil.Process] = set()
        """Ray's own processes, where we started them; all actors and servers descend from them."""
        self.questions: dict[str, Question] = {}
        """How to ask each process whether it is there, by its name."""
        self._worker: ActorHandle
        self.surroundings: Surroundings
        """What `start` found and started."""

    @property
    def logs(self) -> Path:
        return self._folder.logs

    async def __aenter__(self) -> Self:
        os.environ |= ENVIRONMENT
        started = time.monotonic()
        others = set(psutil.Process().children())
        ray.init(**ray_arguments(self._config))
        self._daemons = set(psutil.Process().children()) - others
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
        ours = [process for daemon in self._daemons for process in (daemon, *daemon.children(recursive=True))]
        # Servers first: an actor that is killed cannot say goodbye to its server, only take it along.
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await asyncio.gather(*(server.stop.remote() for server in self._servers), return_exceptions=True)
        ray.shutdown()
        # Ray does not wait for its workers; a busy one lives on for a while.
        for process in psutil.wait_procs(ours, GOODBYE_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    async def start(self, lessons: Lessons) -> ClusterReady:
        """Everything up to the first request. Raises UserError or Fatal with what did not start."""
        debug, idle = self._config.debug, derived.trains_only(self._config)
        ranks = [
            self._actor(LearnerRank, f"learner-{rank}", self._config, rank, self._world_size)
            for rank in range(1 if debug.debug_rollout_only else self._world_size)
        ]
        self._worker = self._actor(RolloutWorker, "rollout", self._config, self._entry, self._folder)
        self.questions |= {f"learner-{rank}": ranks[rank].pid.remote for rank in range(len(ranks))}
        self.questions["rollout"] = self._worker.answers.remote
        started = await self._warm_start(ranks[0], lessons)
        router_url, engines, _ = await _together(
            _nothing("") if idle else self._router(),
            _nothing([]) if idle else self._engines(started.path),
            _nothing(None) if debug.debug_rollout_only else self._load(ranks, started.path),
        )
        channel = "none" if idle or debug.debug_rollout_only else await self._connect(ranks, engines)
        self.surroundings = Surroundings(
            checkpoint=started.path,
            router_url=router_url,
            engines=engines,
            learner_ranks=ranks,
            weight_transfer=channel,
            resume_from=self._resume_from,
        )
        return ClusterReady(
            time=time.time(),
            weight_transfer=channel,
            warm_start_seconds=started.seconds,
            warm_start_cached=started.cached,
        )

    async def run(self) -> None:
        """The run itself. Raises what ended it."""
        await _call(self._worker.run, self.surroundings)

    async def events(self) -> list[Event]:
        """What happened since the last call; waits up to half a second for something to happen."""
        return await _call(self._worker.events)

    async def stop(self) -> None:
        """End the run after the step being taken."""
        await _call(self._worker.stop)

    @property
    def _world_size(self) -> int:
        return derived.learner_ranks(self._config)

    def _actor(self, kind: type[Any], name: str, *arguments: Any, **options: Any) -> ActorHandle:
        """An actor that takes no logical resources: on a CPU machine cores are shared, and pinned where asked for."""
        return ray.remote(kind).options(name=name, num_cpus=0, **options).remote(*arguments)

    def _server(self, kind: type[Any], name: str, spec: Any) -> ActorHandle:
        """Several calls at once, so that it can be stopped, and asked whether it answers, while it starts."""
        server = self._actor(kind, name, spec, max_concurrency=4)
        self.questions[name] = server.answers.remote
        self._servers.append(server)
        return server

    async def _warm_start(self, rank: ActorHandle, lessons: Lessons) -> WarmStarted:
        started: WarmStarted = await _call(rank.warm_start, lessons.problems, lessons.check)
        log.info("warm start", cached=started.cached, seconds=round(started.seconds, 1), accuracy=started.accuracy)
        return started

    async def _load(self, ranks: Sequence[ActorHandle], checkpoint: str) -> None:
        port = free_port()
        await _together(*(_call(rank.start, checkpoint, "127.0.0.1", port) for rank in ranks))
        if self._resume_from is not None:
            await _together(*(_call(rank.load_state, str(self._resume_from)) for rank in ranks))
            log.info("learner resumes", checkpoint=str(self._resume_from))
        log.info("learner is up", ranks=len(ranks))

    async def _router(self) -> str:
        url: str = await _call(self._server(Router, "router", router_spec(self._config, self.logs)).start)
        log.info("router is up", url=url)
        return url

    async def _engines(self, checkpoint: str) -> list[EngineInfo]:
        return await _together(*(self._engine(f"engine-{i}", checkpoint) for i in range(derived.engines(self._config))))

    async def _engine(self, name: str, checkpoint: str) -> EngineInfo:
        spec = engine_spec(self._config, name, checkpoint, self.logs)
        began = time.monotonic()
        info: EngineInfo = await _call(self._server(Engine, name, spec).start)
        log.info("engine is up", engine=name, url=info.url, seconds=round(time.monotonic() - began, 1))
        return info

    async def _connect(self, ranks: Sequence[ActorHandle], engines: Sequence[EngineInfo]) -> str:
        wanted, folder = self._config.weights.weight_transfer, str(self._folder.path / "weights")
        ways = await _together(*(_call(rank.connect, wanted, engines, folder) for rank in ranks))
        log.info("weights travel", by=ways[0], engines=len(engines))
        return str(ways[0])


def _executable(process: psutil.Process) -> str:
    try:
        return process.exe()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


async def _call(method: Any, *arguments: Any) -> Any:
    """A remote call whose failure is the failure itself, not Ray's wrapping of it."""
    try:
        return await method.remote(*arguments)
    except RayTaskError as error:
        if isinstance(error.cause, MilesError):
            raise error.cause from None
        raise Fatal(f"{type(error.cause).__name__}: {error.cause}") from error
    except RayActorError as error:
        raise Fatal(f"a process of the run died: {str(error).splitlines()[0]}") from error


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
