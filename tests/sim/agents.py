"""Simulated agents: the real `FunctionGenerator` on simulated engines, with tool servers that fail."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.errors import InfrastructureError
from miles_async.events import SampleDiscarded
from miles_async.ports import Generator
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.types import DropReason, Group, Sample, SampleStatus, VersionSpan
from tests.sim.engines import Engines, Latency
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import World


@dataclass(frozen=True, kw_only=True)
class AgentModel:
    """One turn per sample, and then a call of a tool server."""

    failure_rate: float = 0.05
    """Fraction of calls that the tool server does not answer."""
    bug_rate: float = 0.0
    """Fraction of calls at which the function itself raises."""
    mean_tokens: float = 200.0
    sigma: float = 0.5
    """Of the log-normal distribution of the response lengths."""
    tokens_per_second: float = 100.0
    """Of each request."""
    tool_seconds: Latency = lambda group, rng: 0.0
    """How long the call of a sample takes: as long in each attempt, and under each schedule."""


class AgentEngines(Engines):
    """Serves single turns, whose length the function has chosen."""

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        [sample] = group
        # The engines remember the remaining work of aborted requests under the name of the group.
        group.feed_index = f"sample {sample.index}"
        await super().generate(group)

    def tokenize(self, group: Group) -> None:
        for sample in group:
            sample.tokens = sample.tokens or [0]

    async def score_logprobs(self, sample: Sample) -> None:
        sample.rollout_log_probs = [0.0] * sample.response_length


class WholeGroups:
    """Discards a whole group if one of its samples fails, as it is done without retries of single samples."""

    def __init__(self, generator: FunctionGenerator) -> None:
        self._generator = generator
        self.requests = generator.requests

    async def generate(self, group: Group) -> None:
        try:
            await self._generator.generate(group)
        except InfrastructureError as error:
            error.samples = list(group)
            raise

    async def abort(self, group: Group | None = None) -> None:
        await self._generator.abort(group)


@dataclass(kw_only=True)
class AgentWorld(World):
    """A simulated run of agents."""

    agents: AgentModel = field(default_factory=AgentModel)
    whole_groups: bool = False
    """A failed sample costs its group."""
    engine_kind: type[Engines] = AgentEngines
    latency: Latency = lambda group, rng: group[0].metadata["seconds"]
    sampled_tokens: int = 0
    """Tokens of all responses that ended, also of those that failed."""

    def _generator(self, clock: VirtualClock) -> Generator:
        self._rng, self._clock = random.Random(f"agents {self.seed}"), clock
        rollout, engines = self.config.rollout, self.fleet
        turns = MultiTurnSampler(engines, None)  # type: ignore[arg-type]
        generator = FunctionGenerator(
            self._call_tool,
            flat_args(self.config).with_values(turns=turns),
            SamplingParams(max_new_tokens=10_000),
            engines,  # type: ignore[arg-type]
            turns,
            live_version=lambda: self.fleet.version,
            timeout_seconds=rollout.generate_timeout_seconds,
            max_attempts=1 if self.whole_groups else rollout.max_attempts,
            on_discarded=self._discarded,
        )
        return WholeGroups(generator) if self.whole_groups else generator

    async def _call_tool(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        model, rng = self.agents, self._rng
        length = max(20, round(model.mean_tokens * rng.lognormvariate(-(model.sigma**2) / 2, model.sigma)))
        length = sample.metadata.setdefault("length", length)
        sample.metadata["seconds"] = length / model.tokens_per_second
        await args.turns.sample(sample, sampling_params)
        if sample.status is SampleStatus.ABORTED:
            return sample
        # The simulated engines set one token per version.
        *first, last = sample.spans
        sample.spans = [*first, VersionSpan(last.version, last.start, length)]
        sample.tokens, sample.response_length, sample.rollout_log_probs = [0] * (1 + length), length, [0.0] * length
        self.sampled_tokens += length
        if seconds := model.tool_seconds(Group([sample]), random.Random(f"{self.seed} {sample.index} 0")):
            await self._clock.sleep(seconds)
            if args.turns.stopped(sample):
                sample.status = SampleStatus.ABORTED  # the model would continue after the answer of the tool
                return sample
        fault = rng.random()
        if fault < model.failure_rate:
            raise ConnectionError("the tool server is down")
        if fault < model.failure_rate + model.bug_rate:
            raise TypeError("a bug of the agent")
        return sample

    def _discarded(self, group: Group, sample: Sample, reason: DropReason, tokens: int, error: str) -> None:
        event = SampleDiscarded(
            time=0.0, sequence=group.sequence, sample=sample.index, reason=reason, tokens=tokens, error=error
        )
        self.journal.emit(event)
