"""A running engine and router that tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from transformers import PreTrainedModel

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.adapters.weights.engine import call_engine
from miles_async.errors import EngineLostError
from miles_async.types import Group, Sample
from tests.waiting import PATIENCE_SECONDS


@dataclass
class Stack:
    """A running engine and router, and the weights that the engine holds, as a Hugging Face model."""

    engine: EngineInfo
    router_url: str
    router_key: str
    logs: Path
    checkpoint: Path
    model: PreTrainedModel

    def __post_init__(self) -> None:
        self.versions = count(1)

    def change_weights(self) -> None:
        """A visible change: log-probabilities move by far more than the tolerance."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """By the names of Hugging Face's files, where every expert has its own tensors."""
        return [named for name, parameter in self.model.named_parameters() for named in _in_files(name, parameter.data)]

    def error(self, sample: Sample, start: int = 0, end: int | None = None, temperature: float = 1.0) -> float:
        """Largest difference between the engine's log-probabilities and this model's, over response tokens."""
        position = sample.prompt_length + start
        kept = None if sample.sampling_mask is None else sample.sampling_mask.rows()[start:end]
        return self._error(list(sample.tokens), position, list(sample.rollout_log_probs[start:end]), temperature, kept)

    def error_of(self, prompt: list[int]) -> float:
        """The same of a short answer, asked for directly."""
        request = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
            "return_logprob": True,
        }
        answer = call_engine(self.engine, "/generate", request, timeout=PATIENCE_SECONDS)
        drawn = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
        return self._error(prompt + answer["output_ids"], len(prompt), drawn)

    def _error(
        self,
        tokens: list[int],
        first: int,
        drawn: list[float],
        temperature: float = 1.0,
        kept: list[list[int]] | None = None,
    ) -> float:
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0] / temperature
        for i, ids in enumerate(kept or []):
            excluded = torch.ones_like(logits[0], dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
            logits[first + i - 1, excluded] = -torch.inf
        logits = logits.log_softmax(-1)
        expected = torch.stack([logits[first + i - 1, tokens[first + i]] for i in range(len(drawn))])
        return float((expected - torch.tensor(drawn)).abs().max())

    @asynccontextmanager
    async def admitted(
        self, *, limit: int = 512, sampling_masks: bool = False
    ) -> AsyncIterator[tuple[SGLangFleet, SGLangGenerator]]:
        """The engine is admitted to the router and holds a version."""
        fleet = SGLangFleet(self.router_url, router_key=self.router_key)
        generator = SGLangGenerator(
            self.router_url,
            CheckpointTokenizer(str(self.checkpoint)),
            SamplingParams(max_new_tokens=40),
            limit=lambda: limit,
            engines=fleet.engines,
            router_key=self.router_key,
            sampling_masks=sampling_masks,
        )
        fleet.register_engine(self.engine)
        try:
            await self.commit_when_idle(fleet)
            await fleet.admit(self.engine.name)
            yield fleet, generator
        finally:
            await generator.close()
            await fleet.close()

    async def commit_when_idle(self, fleet: SGLangFleet) -> None:
        """Commit the next version on the engine, which is not paused.

        The engine answers an aborted request before its scheduler has removed it, and refuses to flush until then.
        """
        version = next(self.versions)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    return await fleet.commit(self.engine.name, version)
                except EngineLostError:
                    await asyncio.sleep(0.05)


def _in_files(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    experts, _, joined = name.rpartition(".")
    if not experts.endswith(".experts"):
        return [(name, tensor)]
    parts = ("gate_proj", "up_proj") if joined == "gate_up_proj" else (joined,)
    return [
        (f"{experts}.{expert}.{part}.weight", its)
        for expert, weights in enumerate(tensor)
        for part, its in zip(parts, weights.chunk(len(parts)), strict=True)
    ]


def group_of(prompt: str | list[int], samples: int = 1) -> Group:
    if isinstance(prompt, str):
        return Group([Sample(index=index, prompt=prompt) for index in range(samples)])
    return Group([Sample(index=index, tokens=list(prompt)) for index in range(samples)])


async def start_generating(
    fleet: SGLangFleet, generator: SGLangGenerator, params: SamplingParams, *groups: Group
) -> asyncio.Task[None]:
    """Start to generate the groups, and return the task when the engine has drawn tokens of them.

    On a busy machine all responses may be complete before this process sees that the engine draws tokens. The groups
    are then generated again.
    """

    async def generate() -> None:
        await asyncio.gather(*(generator.generate(group, params) for group in groups))

    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            running = asyncio.create_task(generate())
            if await tokens_drawn(fleet, running):
                return running
            for group in groups:
                group.reset()


async def tokens_drawn(fleet: SGLangFleet, running: asyncio.Task[None]) -> bool:
    """Wait until the engine's KV cache has grown twice, which requests do while they draw tokens.

    Returns False if `running` ends before.
    """
    usage, rises = await _kv_usage(fleet), 0
    while rises < 2 and not running.done():
        await asyncio.sleep(0.01)
        before, usage = usage, await _kv_usage(fleet)
        rises += usage > before
    return not running.done()


async def _kv_usage(fleet: SGLangFleet) -> float:
    return sum(load.kv_usage for load in await fleet.loads())
