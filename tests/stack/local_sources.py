"""Weight sources inside one process, for tests and benchmarks of publishing without a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.source import Source
from miles_async.adapters.weights.staging import NamedTensors
from miles_async.types import WriteOutcome


class LocalSources:
    """`adapters.weights.channel.Sources`; `weights` are those of now, and every source is a thread."""

    def __init__(
        self, weights: Callable[[], NamedTensors], folder: Path, *, sources: int = 1, timeout: float = 20.0
    ) -> None:
        self._weights = weights
        named = [(name, tuple(tensor.shape)) for name, tensor in weights()]
        self.all = [Source(named, folder, rank=rank, sources=sources, timeout=timeout) for rank in range(sources)]

    async def meet(self, engines: Sequence[EngineInfo]) -> None:
        for source in self.all:
            await asyncio.to_thread(source.meet, engines)

    async def reach(self, transport: str, engine: str) -> None:
        for source in self.all:
            await asyncio.to_thread(source.reach, transport, engine)

    async def stage(self, version: int, transports: Sequence[str]) -> None:
        for source in self.all:
            await asyncio.to_thread(source.stage, version, self._weights())
            for transport in transports:
                await asyncio.to_thread(source.prepare, transport)

    async def write(self, version: int, engine: str, transport: str) -> list[WriteOutcome]:
        return await asyncio.gather(*(asyncio.to_thread(one.write, version, engine, transport) for one in self.all))

    def close(self) -> None:
        for source in self.all:
            source.close()
