"""Builds the generators of a run: the engines, and a user's generate function or agents on top of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from miles_async.adapters.agents.endpoint import AgentEndpoint, Agents
from miles_async.adapters.agents.messages import AnswerParser
from miles_async.adapters.agents.trajectories import TrajectoryBuffer
from miles_async.adapters.environments.process import EnvironmentProcess
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import EVALUATION_PRIORITY, SamplingParams, SGLangGenerator, TokenLimits
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.system.clock import SystemClock
from miles_async.columns.column import SampleLimits
from miles_async.config.generation import rollout_mode, serves_agents
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import load_function, with_keywords
from miles_async.events import AgentSessionExpired
from miles_async.guests import GUESTS
from miles_async.pipeline.journal import Journal
from miles_async.ports import Generator, Rewarder
from miles_async.rollout.contract import Arguments, flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.rollout.recording_generator import RecordingGenerator
from miles_async.rollout.recordings import RecordingContext, identity_of
from miles_async.rollout.sample_hooks import HookedGenerator
from miles_async.rollout.sample_service import SampleService
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.stored_run import StoredRun

from .specs import ClusterHandles, greedy_of, sampling_of, seed_of_requests

RunGenerator = SGLangGenerator | FunctionGenerator | HookedGenerator
"""A generator of a run; it takes sampling parameters."""


@dataclass(eq=False, repr=False)
class GeneratorFactory:
    """Builds the generator for training and those for evaluations, which use the same engines.

    The endpoint for agents is served inside the `async with` block.
    """

    config: RunConfig
    handles: ClusterHandles
    fleet: SGLangFleet
    tokenizer: CheckpointTokenizer
    parser: AnswerParser | None
    """Finds tool calls and reasoning in answers to agents."""
    journal: Journal
    stored: StoredRun | None
    """The state of the run that a lost rollout worker has left."""
    live_version: Callable[[], int]
    adapters: AdapterVersions | None
    limits: SampleLimits
    agent_key_file: Path
    """External generators read the key of the endpoint from it."""

    def __post_init__(self) -> None:
        config, handles = self.config, self.handles
        self.trajectories = TrajectoryBuffer(
            config.rollout.queue_capacity,
            config.rollout.n_samples_per_prompt,
            log=self.journal,
            limits=self.limits,
            newest_version=self.live_version,
            stored=self.stored,
        )
        """The groups that external generators have posted."""
        self._external = rollout_mode(config).takes_posted_groups
        self._endpoint = AgentEndpoint(
            self.trajectories if self._external else None,
            parser=self.parser,
            session_seconds=config.rollout.generate_timeout_seconds,
            on_expired=lambda: self.journal.emit(AgentSessionExpired(time=time.time())),
        )
        self._environment = EnvironmentProcess(config.data, self._endpoint.key)
        self._service = SampleService(sampling_of(config), max_attempts=config.rollout.max_attempts)
        self.args = _arguments(config, handles).with_values(
            sample_service=self._service,
            tokenizer=self.tokenizer,
            trajectories=self.trajectories,
            environment_process=self._environment,
        )
        """The arguments of user functions."""
        if handles.router_url:
            GUESTS.ask("use the router", lambda guest: guest.use_router(handles.router_url, handles.router_key))
        engines = partial(
            SGLangGenerator,
            handles.router_url,
            self.tokenizer,
            limit=partial(self._max_requests, config.engine.sglang_server_concurrency),
            engines=self.fleet.engines,
            router_key=handles.router_key,
            adapters=self.adapters,
            seed=seed_of_requests(config),
            request_timeout=config.engine.sglang_router_request_timeout_secs,
            on_request=self.journal.emit if config.observability.trace else None,
        )
        self.engine_client = engines(
            sampling_of(config),
            max_prompt_tokens=config.rollout.rollout_max_prompt_len,
            longest_sample=self.limits.longest,
            dataset_limits={
                name: TokenLimits(dataset.max_prompt_len, dataset.max_response_len)
                for name, dataset in config.data.datasets.items()
            },
            sampling_masks=config.trains_on_sampling_masks,
        )
        """Samples from the engines with the settings of training."""
        beside_training: dict[str, Any] = {}
        if extra_requests := config.evaluation_concurrency:
            # Evaluations then run while training generates, so they get their own requests at a lower priority.
            limit = partial(self._max_requests, extra_requests)
            beside_training = {"limit": limit, "priority": EVALUATION_PRIORITY}
        self._evaluation = engines(greedy_of(config), **beside_training)

    async def __aenter__(self) -> Self:
        """Start the endpoint if the run uses it. Raises UserError if `agent_port` is already in use."""
        if serves_agents(self.config):
            await self._endpoint.start(self.config.rollout.agent_port)
        if self._external:
            # External generators use the same key after the rollout worker was replaced.
            if self.agent_key_file.exists() and (key := self.agent_key_file.read_text()):
                self._endpoint.key = key
            else:
                self.agent_key_file.touch(mode=0o600)
                self.agent_key_file.write_text(self._endpoint.key)
            sampling = self.engine_client.sampling
            turns = MultiTurnSampler(self.engine_client, self.tokenizer)
            self._endpoint.accept_external(turns, sampling.body(sampling.max_new_tokens), live=self._weights_live)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._environment.close()
        await self._endpoint.close()
        await self.engine_client.close()
        await self._evaluation.close()

    def training(self) -> RunGenerator:
        """The generator of the training data."""
        return self._generator(self.engine_client, self.limits, evaluation=False)

    def evaluation(self, sampling: SamplingParams) -> RunGenerator:
        """A generator for evaluations with the given sampling settings."""
        # Responses of evaluations are not trained, so they have no sampling masks, and any log-probabilities suffice.
        limits = replace(self.limits, sampling_masks=None, scores_missing=True)
        return self._generator(self._evaluation.with_sampling(sampling), limits, evaluation=True)

    def connect(self, live: RunGenerator, rewarder: Rewarder) -> None:
        """Let users' functions generate and score samples. `live` is the generator of `training`."""
        self._service.connect(generator=live, evaluator=self.evaluation(greedy_of(self.config)), rewarder=rewarder)

    async def recording(self, live: Generator, checkpoint: str, *, stream: bool) -> RecordingGenerator | None:
        """A generator that records or replays calls of `live`; None if nothing is recorded.

        `stream` is whether the run is fully asynchronous. Tells the guests that the run begins.
        """
        config = self.config
        identity = await asyncio.to_thread(identity_of, config, checkpoint)
        # A recording that is too long for this learner is not damaged, and its groups are generated again.
        limits = replace(self.limits, longest=None)
        context = RecordingContext(identity=identity, limits=limits, warn=self.journal.warn)
        GUESTS.ask("begin a run", lambda guest: guest.begin_run(config, context))
        if not (config.skip.async_rollout if stream else config.skip.rollout).enable:
            return None
        return RecordingGenerator(
            live,
            config,
            context,
            stream=stream,
            clock=SystemClock(),
            events=self.journal,
            live_version=self.live_version,
        )

    def _generator(self, engine: SGLangGenerator, limits: SampleLimits, *, evaluation: bool) -> RunGenerator:
        """Sample whole groups from the engines, or each sample through `custom_generate_function_path` if it is set.

        The hooks of `rollout_sample_hook_path` are called with each finished sample.
        """
        generator = self._user_function(engine, limits, evaluation=evaluation) or engine
        paths = self.config.rollout.rollout_sample_hook_path
        if not paths:
            return generator
        seconds = self.config.rollout.generate_timeout_seconds
        return HookedGenerator(generator, paths, self.args, limits, timeout_seconds=seconds, evaluation=evaluation)

    def _user_function(
        self, engine: SGLangGenerator, limits: SampleLimits, *, evaluation: bool
    ) -> FunctionGenerator | None:
        path = self.config.rollout.custom_generate_function_path
        if path is None:
            return None
        turns = MultiTurnSampler(engine, self.tokenizer)
        agents = Agents(self._endpoint, turns, prompts_are_rendered=self.config.data.apply_chat_template)
        return FunctionGenerator(
            with_keywords(load_function(path, setting="custom_generate_function_path"), {"evaluation": evaluation}),
            self.args.with_values(turns=turns, agents=agents),
            engine.sampling,
            engine,
            turns,
            live_version=self.live_version,
            timeout_seconds=self.config.rollout.generate_timeout_seconds,
            max_attempts=self.config.rollout.max_attempts,
            engines_abort=self.config.weights.pause_generation_mode == "abort",
            seed=seed_of_requests(self.config),
            limits=limits,
            on_discarded=None if evaluation else self.journal.report_discarded,
        )

    def _max_requests(self, per_engine: int) -> int:
        """The most concurrent requests for the current number of engines."""
        return per_engine * len(self.fleet.members())

    def _weights_live(self) -> bool:
        return self.live_version() >= 0


def _arguments(config: RunConfig, handles: ClusterHandles) -> Arguments:
    if not handles.router_url:
        return flat_args(config)
    host, _, port = handles.router_url.removeprefix("http://").rpartition(":")
    return flat_args(
        config, sglang_router_ip=host, sglang_router_port=int(port), sglang_router_api_key=handles.router_key
    )
