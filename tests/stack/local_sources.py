"""Weight sources inside one process, for tests and benchmarks of publishing without a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.adapters import AdapterSource
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import NamedTensors, describe
from miles_async.config.schema import Weights
from miles_async.models.lora import AdapterConfig
from miles_async.scheduling.lineage import Lineage
from miles_async.types import SendOutcome
from tests.waiting import PATIENCE_SECONDS


class LocalSources:
    """`adapters.weights.channel.Ranks`; `weights` are those of now, and every source is a thread."""

    def __init__(
        self,
        weights: Callable[[], NamedTensors],
        folder: Path,
        *,
        sources: int = 1,
        timeout: float = PATIENCE_SECONDS,
        adapter: AdapterConfig | None = None,
        resident: int = 0,
        colocated: bool = False,
    ) -> None:
        """With `adapter`, the weights are those of an adapter, of which engines hold `resident` versions.

        `colocated` engines with adapters release their memory between two sends.
        """
        self._weights = weights
        settings = Weights(update_weight_timeout_seconds=timeout)
        self.all: list[WeightSource | AdapterSource]
        if adapter is not None:
            self.all = [
                AdapterSource(folder, adapter, settings, rank=rank, resident=resident, colocated=colocated)
                for rank in range(sources)
            ]
        else:
            named = describe(weights())
            self.all = [WeightSource(named, folder, settings, rank=rank, sources=sources) for rank in range(sources)]

    async def on_all(self, method: str, *arguments: Any) -> list[Any]:
        return await getattr(self, method)(*arguments)

    async def connect(self, engines: Sequence[EngineInfo], transports: Mapping[str, str]) -> None:
        for source in self.all:
            await asyncio.to_thread(source.connect, engines, transports)

    async def stage(
        self, version: int, transports: Sequence[str], adapter: str = "", lineage: Lineage | None = None
    ) -> None:
        for source in self.all:
            await asyncio.to_thread(source.stage, version, self._weights(), transports)

    async def send(self, version: int, engine: str, transport: str) -> list[SendOutcome]:
        return await asyncio.gather(*(asyncio.to_thread(one.send, version, engine, transport) for one in self.all))

    async def compare(self, engine: str) -> list[None]:
        """Without a learner there is nothing to compare an engine with."""
        return [None for _ in self.all]

    async def drop(self, engine: str) -> None:
        for source in self.all:
            await asyncio.to_thread(source.drop, engine)

    def close(self) -> None:
        for source in self.all:
            source.close()
