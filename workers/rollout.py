"""The process that generates: a Ray actor whose event loop (uvloop) is `pipeline/service.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_async.adapters.datasets.evaluation import eval_groups
from miles_async.adapters.datasets.factory import open_data
from miles_async.adapters.datasets.source import Report
from miles_async.adapters.ray.learner import RayLearner
from miles_async.adapters.ray.servers import RayServers
from miles_async.adapters.ray.weights import RaySources
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.storage.checkpoints import progress_in
from miles_async.adapters.storage.dead_letters import DeadLetterFile
from miles_async.adapters.system.clock import SystemClock
from miles_async.adapters.system.garbage_collection import spare_the_loop
from miles_async.adapters.weights.channel import Channel
from miles_async.config.derived import bounds_of, trains_only
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function
from miles_async.events import DataSkipped, Event, WarningRaised
from miles_async.observability.console.logging import configure_worker_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.pipeline.evaluate import EvalSet, Scores
from miles_async.pipeline.progress import resume
from miles_async.pipeline.service import EvaluationFunction, Ports, Service
from miles_async.pipeline.source import RolloutSource
from miles_async.ports import Generator
from miles_async.rewards.factory import open_rewarder
from miles_async.rollout.contract import Arguments, call_rollout_function, flat_args
from miles_async.scheduling.bounds import Schedule
from miles_async.skip import SkipManager, SkipWorld
from miles_async.skip.generator import SkippingGenerator
from miles_async.skip.identity import identity_of

from .batches import Batches
from .debugging import dump_tokenizer, half_of, without_gate
from .generators import Generators
from .preflight import dynamic_filter, rollout_function
from .specs import eval_sampling_of, greedy_of


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The processes that a rollout worker finds running."""

    checkpoint: str
    """The folder that learner and engines were started from."""
    router_url: str
    """Empty where nothing is generated."""
    engines: Sequence[EngineInfo]
    engine_actors: Mapping[str, Sequence[Any]]
    """Handles of their actors, by name: one per node that the engine spans."""
    router_actor: Any
    """Handle of the router's actor; None where the router is somebody else's."""
    learner_ranks: Sequence[Any]
    """Handles of the learner's actors, by rank."""
    weight_transports: Sequence[str]
    """The ways that weights can take, best first."""
    resume_from: Path | None
    """The checkpoint that the learner was resumed from."""


class Outbox:
    """An event sink that the driver empties; `take` waits for the next events instead of polling."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._filled = asyncio.Event()

    def emit(self, event: Event) -> None:
        self._events.append(event)
        self._filled.set()

    async def take(self, patience_seconds: float) -> list[Event]:
        """Everything since the last call; waits up to `patience_seconds` for something."""
        try:
            await asyncio.wait_for(self._filled.wait(), patience_seconds)
        except TimeoutError:
            return []
        events, self._events = self._events, []
        self._filled.clear()
        return events


class RolloutWorker:
    """Hosts the service. `run` ends with the run; `events` and `stop` are served meanwhile."""

    def __init__(self, config: RunConfig, entry: str, folder: RunFolder) -> None:
        self._config = config
        self._entry = entry
        self._bounds = bounds_of(config, entry)
        self._folder = folder
        self._outbox = Outbox()
        self._service: Service | None = None
        self._asked_to_stop = False
        self._servers: RayServers
        self._fleet: SGLangFleet

    async def log_to(self, logs: Path, process: str) -> None:
        """Write log and output into files there from now on."""
        configure_worker_logging(logs, process, logs.parent.name)

    async def run(self, around: Surroundings) -> None:
        """The whole run. Raises UserError, Fatal, or what a user's function raised."""
        config = self._config
        async with AsyncExitStack() as at_the_end:
            fleet = await self._connect(around)
            if around.router_actor is None:
                at_the_end.push_async_callback(self._leave_router)
            generators = await at_the_end.enter_async_context(
                Generators(
                    config,
                    around.router_url,
                    fleet,
                    CheckpointTokenizer(around.checkpoint),
                    self._arguments(around.router_url),
                    events=self._outbox,
                    live_version=self._live_version,
                )
            )
            args = generators.args
            data = open_data(config, checkpoint=around.checkpoint, args=args, report=self._reporter())
            resumed = around.resume_from
            first_rollout = 0 if resumed is None else resume(progress_in(resumed), data)
            rewarder = open_rewarder(config, args)
            at_the_end.push_async_callback(rewarder.close)
            live = generators.training()
            skipping = await self._skipping(live, around.checkpoint)
            ports = Ports(
                clock=SystemClock(),
                events=self._outbox,
                data=data,
                generator=skipping or live,
                evaluator=generators.evaluation(greedy_of(config)),
                rewarder=rewarder,
                learner=RayLearner(config, around.learner_ranks),
                channel=Channel(around.weight_transports, RaySources(around.learner_ranks), fleet.address),
                fleet=fleet,
                dead_letters=DeadLetterFile(self._folder.path / "dead_letters.jsonl"),
                keep=dynamic_filter(config, args),
                problems=data.eval_problems(),
                eval_sets=[
                    EvalSet(
                        name=name,
                        problems=eval_groups(config, name, dataset, checkpoint=around.checkpoint),
                        generator=generators.evaluation(eval_sampling_of(config, dataset)),
                    )
                    for name, dataset in config.rollout.eval_datasets.items()
                ],
                evaluate=self._evaluation(args),
            )
            self._service = Service(
                without_gate(config),
                self._bounds,
                half_of(config, ports),
                synchronous=self._bounds.schedule is Schedule.SYNCHRONOUS or trains_only(config),
                first_rollout=first_rollout,
            )
            if self._asked_to_stop:
                self._service.stop()
            await dump_tokenizer(config, around.checkpoint)
            run_state = self._service.run_state
            rollout = Batches(
                config,
                rollout_function(config, self._entry),
                args,
                self._outbox,
                trainer_version=lambda: run_state.trainer_version,
                rate=generators.frontend.rate,
                skipping=skipping,
            )
            spare_the_loop()
            await self._service.run(rollout)

    async def _connect(self, around: Surroundings) -> SGLangFleet:
        """The engines that were found running, and the router told of them."""
        engine = self._config.engine
        self._servers = RayServers(around.engine_actors, around.router_actor, engine.engine_start_timeout_seconds)
        self._fleet = SGLangFleet(
            around.router_url,
            processes=self._servers,
            tell=self._outbox.emit,
            health_timeout=engine.engine_health_timeout_seconds,
            colocated=self._config.cluster.colocate,
        )
        for info in around.engines:
            self._fleet.introduce(info)
            await self._fleet.admit(info.name)
        return self._fleet

    async def _leave_router(self) -> None:
        """Nobody else would tell somebody else's router that the engines are gone."""
        for engine in self._fleet.routed():
            await self._fleet.fence(engine, "the run has ended")

    def _reporter(self) -> Report:
        """Tells of what the data source passes over; a batch function may call it from a thread of its own."""
        loop = asyncio.get_running_loop()

        def report(reason: str, sentence: str) -> None:
            event = DataSkipped(time=time.time(), reason=reason, sentence=sentence)
            loop.call_soon_threadsafe(self._outbox.emit, event)

        return report

    def _evaluation(self, args: Arguments) -> EvaluationFunction | None:
        path = self._config.rollout.eval_function_path
        if path is None:
            return None
        function = load_function(path, setting="eval_function_path")

        async def evaluate(rollout_id: int, source: RolloutSource) -> Scores:
            scores: Scores = await call_rollout_function(function, args, rollout_id, source, evaluation=True)
            return scores

        return evaluate

    async def events(self) -> list[Event]:
        """What happened since the last call; waits up to half a second for something to happen."""
        return await self._outbox.take(0.5)

    async def answers(self) -> None:
        """Return, to show that the event loop turns."""

    async def add_engine(self, name: str, actors: Sequence[Any]) -> None:
        """Start another engine in the background; it serves once it holds the current weights."""
        self._servers.add(name, actors)
        self._fleet.enlist(name)

    async def remove_engine(self, name: str) -> None:
        """Send it no more requests; what it still holds fails when it ends, and is generated elsewhere."""
        assert self._service is not None, "only a run has engines"
        await self._service.remove_engine(name)

    async def stop(self) -> None:
        """End the run after the step being taken, or before the first where it is still being set up."""
        self._asked_to_stop = True
        if self._service is not None:
            self._service.stop()

    async def _skipping(self, live: Generator, checkpoint: str) -> SkippingGenerator | None:
        """Around `live` where some role is enabled; None otherwise."""
        config = self._config

        def warn(text: str) -> None:
            self._outbox.emit(WarningRaised(time=time.time(), text=text))

        identity = await asyncio.to_thread(identity_of, config, checkpoint)
        manager = SkipManager.init(config, SkipWorld(config=config, identity=identity, warn=warn))
        if not manager.any_enabled:
            return None
        stream = self._bounds.schedule is Schedule.FULLY_ASYNC
        return SkippingGenerator(
            live,
            manager,
            stream=stream,
            clock=SystemClock(),
            events=self._outbox,
            live_version=self._live_version,
        )

    def _live_version(self) -> int:
        return self._service.run_state.live_version if self._service is not None else -1

    def _arguments(self, router_url: str) -> Arguments:
        if not router_url:
            return flat_args(self._config)
        host, _, port = router_url.removeprefix("http://").rpartition(":")
        return flat_args(self._config, sglang_router_ip=host, sglang_router_port=int(port))
