"""A running engine and router for tests to tell stories with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from transformers import PreTrainedModel

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.types import Group, Sample


@dataclass
class Stack:
    """A running engine and router, and the weights that the engine holds, as a Hugging Face model."""

    engine: EngineInfo
    router_url: str
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
        """By the names of Hugging Face's files, where every expert has tensors of its own."""
        return [named for name, parameter in self.model.named_parameters() for named in _in_files(name, parameter.data)]

    def error(self, sample: Sample, start: int = 0, end: int | None = None) -> float:
        """Largest difference between the engine's log-probabilities and this model's, over response tokens."""
        with torch.no_grad():
            logits = self.model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
        places = range(sample.prompt_length + start, sample.prompt_length + (end or sample.response_length))
        expected = torch.stack([logits[place - 1, sample.tokens[place]] for place in places])
        return float((expected - torch.tensor(sample.rollout_log_probs[start:end])).abs().max())

    def run(self, story: Callable[[SGLangFleet, SGLangGenerator], Awaitable[None]], *, limit: int = 512) -> None:
        """Tell a story with the engine admitted to the router, holding a version."""

        async def told() -> None:
            fleet = SGLangFleet(self.router_url)
            sampling = SamplingParams(max_new_tokens=40)
            generator = SGLangGenerator(
                self.router_url,
                CheckpointTokenizer(str(self.checkpoint)),
                sampling,
                limit=limit,
                engine_urls=fleet.urls,
            )
            fleet.introduce(self.engine)
            try:
                await fleet.commit(self.engine.name, next(self.versions))
                await fleet.admit(self.engine.name)
                await story(fleet, generator)
            finally:
                await generator.close()
                await fleet.close()

        asyncio.run(told())


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
