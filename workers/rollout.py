"""The process that generates: a Ray actor whose event loop (uvloop) is `pipeline/service.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from miles_async.adapters.checkpoints import progress_in
from miles_async.adapters.datasets.evaluation import eval_groups
from miles_async.adapters.datasets.opening import open_data
from miles_async.adapters.datasets.source import Report
from miles_async.adapters.dead_letters import DeadLetterFile
from miles_async.adapters.garbage import spare_the_loop
from miles_async.adapters.openai.endpoint import AgentEndpoint, Agents
from miles_async.adapters.openai.trajectories import Trajectories
from miles_async.adapters.ray.learner import RayLearner
from miles_async.adapters.ray.servers import RayServers
from miles_async.adapters.ray.weights import RaySources
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import (
    EVALUATION_PRIORITY,
    SampledAs,
    SamplingParams,
    SGLangGenerator,
)
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.sglang.turns import Turns
from miles_async.adapters.system_clock import SystemClock
from miles_async.adapters.weights.channel import Channel
from miles_async.config.derived import EXTERNAL_FUNCTION, bounds_of, evaluation_places, trains_only
from miles_async.config.schema import RunConfig
from miles_async.core.bounds import Schedule
from miles_async.core.loading import load_function
from miles_async.observability.events import DataSkipped, Event, Warned
from miles_async.observability.logging import configure_worker_logging
from miles_async.observability.run_folder import RunFolder
from miles_async.pipeline.evaluate import EvalSet, Scores
from miles_async.pipeline.progress import resume
from miles_async.pipeline.service import EvaluationFunction, Ports, Service
from miles_async.pipeline.source import RolloutSource
from miles_async.ports import Generator
from miles_async.rewards.opening import open_rewarder
from miles_async.rollout.contract import Arguments, call_rollout_function, flat_args
from miles_async.rollout.generate import FunctionGenerator, load_generate_function
from miles_async.skip import SkipManager, SkipWorld
from miles_async.skip.generator import SkippingGenerator
from miles_async.skip.identity import identity_of
from workers.batches import Batches
from workers.debugging import dump_tokenizer, half_of, without_gate
from workers.preflight import dynamic_filter, rollout_function
from workers.specs import eval_sampling_of, greedy_of, sampling_of


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
    weight_ways: Sequence[str]
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
        tokenizer = CheckpointTokenizer(around.checkpoint)
        args = self._arguments(around.router_url).adding(tokenizer=tokenizer)
        self._servers = RayServers(
            around.engine_actors, around.router_actor, config.engine.engine_start_timeout_seconds
        )
        fleet = self._fleet = SGLangFleet(
            around.router_url,
            processes=self._servers,
            tell=self._outbox.emit,
            health_timeout=config.engine.engine_health_timeout_seconds,
            colocated=config.cluster.colocate,
        )
        for engine in around.engines:
            fleet.introduce(engine)
            await fleet.admit(engine.name)

        engines = partial(
            SGLangGenerator,
            around.router_url,
            tokenizer,
            limit=partial(self._room, config.engine.sglang_server_concurrency),
            engine_urls=fleet.urls,
            request_timeout=config.engine.sglang_router_request_timeout_secs,
            on_request=self._outbox.emit if config.observability.trace else None,
        )
        trajectories = Trajectories(config.rollout.queue_capacity, config.rollout.n_samples_per_prompt)
        endpoint = AgentEndpoint(trajectories)
        await endpoint.start(config.rollout.agent_port)
        args = args.adding(trajectories=trajectories)
        generator = partial(self._generator, tokenizer, endpoint, args)
        frontend = engines(sampling_of(config), longest_prompt=config.rollout.rollout_max_prompt_len)
        if config.rollout.rollout_function_path == EXTERNAL_FUNCTION:
            visitors = frontend.sampling.body(frontend.sampling.max_new_tokens)
            endpoint.welcome(Turns(frontend, tokenizer), visitors, live=lambda: self._live_version() >= 0)
        evaluation = engines(greedy_of(config))
        if beside := evaluation_places(config):
            evaluation = engines(greedy_of(config), limit=partial(self._room, beside), priority=EVALUATION_PRIORITY)
        data = open_data(config, checkpoint=around.checkpoint, args=args, report=self._reporter())
        first_rollout = 0
        if around.resume_from is not None:
            first_rollout = resume(progress_in(around.resume_from), data)
        live = generator(frontend, sampling_of(config))
        skipping = await self._skipping(live, around.checkpoint)
        rewarder = open_rewarder(config, args)
        self._service = Service(
            without_gate(config),
            self._bounds,
            half_of(
                config,
                Ports(
                    clock=SystemClock(),
                    events=self._outbox,
                    data=data,
                    generator=skipping or live,
                    evaluator=generator(evaluation, greedy_of(config)),
                    rewarder=rewarder,
                    learner=RayLearner(config, around.learner_ranks),
                    channel=Channel(around.weight_ways, RaySources(around.learner_ranks), fleet.address),
                    fleet=fleet,
                    dead_letters=DeadLetterFile(self._folder.path / "dead_letters.jsonl"),
                    keep=dynamic_filter(config, args),
                    problems=data.eval_problems(),
                    eval_sets=[
                        EvalSet(
                            name=name,
                            problems=eval_groups(config, name, dataset, checkpoint=around.checkpoint),
                            generator=generator(evaluation, eval_sampling_of(config, dataset)),
                        )
                        for name, dataset in config.rollout.eval_datasets.items()
                    ],
                    evaluate=self._evaluation(args),
                ),
            ),
            take_turns=self._bounds.schedule is Schedule.TURNS or trains_only(config),
            first_rollout=first_rollout,
        )
        if self._asked_to_stop:
            self._service.stop()
        await dump_tokenizer(config, around.checkpoint)
        books = self._service.books
        rollout = Batches(
            config,
            rollout_function(config, self._entry),
            args,
            self._outbox,
            trainer_version=lambda: books.trainer_version,
            rate=frontend.rate,
            skipping=skipping,
        )
        spare_the_loop()
        try:
            await self._service.run(rollout)
        finally:
            if around.router_actor is None:
                # Nobody else would tell somebody else's router.
                for engine in fleet.routed():
                    await fleet.fence(engine, "the run has ended")
            await endpoint.close()
            await rewarder.close()

    def _reporter(self) -> Report:
        """Tells of what the data source passes over; a batch function may call it from a thread of its own."""
        loop = asyncio.get_running_loop()

        def report(reason: str, sentence: str) -> None:
            event = DataSkipped(time=time.time(), reason=reason, sentence=sentence)
            loop.call_soon_threadsafe(self._outbox.emit, event)

        return report

    def _generator(
        self,
        tokenizer: CheckpointTokenizer,
        endpoint: AgentEndpoint,
        args: Arguments,
        engine: SGLangGenerator,
        sampling: SamplingParams,
    ) -> Generator:
        """Whole groups by the engines themselves, or each sample by the user's own function on top of them."""
        path = self._config.rollout.custom_generate_function_path
        if path is None:
            return SampledAs(engine, sampling)
        turns = Turns(engine, tokenizer)
        return FunctionGenerator(
            load_generate_function(path),
            args.adding(turns=turns, agents=Agents(endpoint, turns)),
            sampling,
            engine,
            turns,
            live_version=self._live_version,
            timeout_seconds=self._config.rollout.generate_timeout_seconds,
        )

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

    def _room(self, places: int) -> int:
        """Samples at so many engines as there are now, by the places of each."""
        return places * len(self._fleet.members())

    async def stop(self) -> None:
        """End the run after the step being taken, or before the first where it is still being set up."""
        self._asked_to_stop = True
        if self._service is not None:
            self._service.stop()

    async def _skipping(self, live: Generator, checkpoint: str) -> SkippingGenerator | None:
        """Around `live` where some role is enabled; None otherwise."""
        config = self._config

        def warn(text: str) -> None:
            self._outbox.emit(Warned(time=time.time(), text=text))

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
        return self._service.books.live_version if self._service is not None else -1

    def _arguments(self, router_url: str) -> Arguments:
        if not router_url:
            return flat_args(self._config)
        host, _, port = router_url.removeprefix("http://").rpartition(":")
        return flat_args(self._config, sglang_router_ip=host, sglang_router_port=int(port))
