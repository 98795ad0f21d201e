"""What generates in a run: the engines, and on top of them agents and a user's own function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

from miles_async.adapters.agents.endpoint import AgentEndpoint, Agents
from miles_async.adapters.agents.trajectories import Trajectories
from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import EVALUATION_PRIORITY, SampledAs, SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.config.derived import EXTERNAL_FUNCTION, evaluation_places
from miles_async.config.schema import RunConfig
from miles_async.events import EventSink
from miles_async.ports import Generator
from miles_async.rollout.contract import Arguments
from miles_async.rollout.generate import FunctionGenerator, load_generate_function

from .specs import greedy_of, sampling_of


class Generators:
    """One for training and some for evaluations, over the same engines. Agents are served while it is entered."""

    def __init__(
        self,
        config: RunConfig,
        router_url: str,
        fleet: SGLangFleet,
        tokenizer: CheckpointTokenizer,
        args: Arguments,
        *,
        events: EventSink,
        live_version: Callable[[], int],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._live_version = live_version
        trajectories = Trajectories(config.rollout.queue_capacity, config.rollout.n_samples_per_prompt)
        self._endpoint = AgentEndpoint(trajectories)
        self.args = args.adding(tokenizer=tokenizer, trajectories=trajectories)
        """What users' functions are given."""
        engines = partial(
            SGLangGenerator,
            router_url,
            tokenizer,
            limit=partial(self._room, config.engine.sglang_server_concurrency),
            engine_urls=fleet.urls,
            request_timeout=config.engine.sglang_router_request_timeout_secs,
            on_request=events.emit if config.observability.trace else None,
        )
        self.frontend = engines(sampling_of(config), longest_prompt=config.rollout.rollout_max_prompt_len)
        """The engines themselves, as training samples from them."""
        self._evaluation = engines(greedy_of(config))
        if beside := evaluation_places(config):
            room = partial(self._room, beside)
            self._evaluation = engines(greedy_of(config), limit=room, priority=EVALUATION_PRIORITY)

    async def __aenter__(self) -> Self:
        """Raises UserError where `agent_port` is taken."""
        await self._endpoint.start(self._config.rollout.agent_port)
        if self._config.rollout.rollout_function_path == EXTERNAL_FUNCTION:
            sampling = self.frontend.sampling
            turns = MultiTurnSampler(self.frontend, self._tokenizer)
            self._endpoint.welcome(turns, sampling.body(sampling.max_new_tokens), live=self._serves)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._endpoint.close()

    def training(self) -> Generator:
        return self._over(self.frontend, sampling_of(self._config))

    def evaluation(self, sampling: SamplingParams) -> Generator:
        return self._over(self._evaluation, sampling)

    def _over(self, engine: SGLangGenerator, sampling: SamplingParams) -> Generator:
        """Whole groups by the engines themselves, or each sample by the user's own function on top of them."""
        path = self._config.rollout.custom_generate_function_path
        if path is None:
            return SampledAs(engine, sampling)
        turns = MultiTurnSampler(engine, self._tokenizer)
        return FunctionGenerator(
            load_generate_function(path),
            self.args.adding(turns=turns, agents=Agents(self._endpoint, turns)),
            sampling,
            engine,
            turns,
            live_version=self._live_version,
            timeout_seconds=self._config.rollout.generate_timeout_seconds,
        )

    def _room(self, places: int) -> int:
        """Samples at so many engines as there are now, by the places of each."""
        return places * len(self._fleet.members())

    def _serves(self) -> bool:
        return self._live_version() >= 0
