"""`ports.WeightChannel` inside one process, for tests and benchmarks of publishing without a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.source import Source
from miles_async.adapters.weights.staging import NamedTensors
from miles_async.types import WriteOutcome

Weights = Callable[[], NamedTensors]


class LocalChannel:
    """`ways` by preference; `weights` are those of now. Several `sources` each send their share."""

    def __init__(
        self,
        ways: Sequence[str],
        weights: Weights,
        folder: Path,
        *,
        sources: int = 1,
        bucket: int = 512 << 20,
        everything: bool = False,
        timeout: float = 20.0,
    ) -> None:
        self._ways = ways
        self._weights = weights
        named = [(name, tuple(tensor.shape)) for name, tensor in weights()]
        self.sources = [
            Source(named, folder, rank=rank, sources=sources, bucket=bucket, everything=everything, timeout=timeout)
            for rank in range(sources)
        ]
        self._falls: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self._ways[0]

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        for source in self.sources:
            source.meet(engines)
        for engine in engines:
            self._falls.pop(engine.name, None)

    async def stage(self, version: int) -> None:
        def staged(source: Source) -> None:
            source.stage(version, self._weights())
            source.prepare(self.name)

        await asyncio.gather(*(asyncio.to_thread(staged, source) for source in self.sources))

    async def write(self, version: int, engines: Sequence[str]) -> list[WriteOutcome]:
        return [await self.write_one(version, engine, self._ways[self._falls.get(engine, 0)]) for engine in engines]

    async def write_one(self, version: int, engine: str, way: str) -> WriteOutcome:
        parts = await asyncio.gather(
            *(asyncio.to_thread(source.write, version, engine, way) for source in self.sources)
        )
        errors = [part.error for part in parts if part.error]
        return WriteOutcome(
            engine=engine,
            seconds=max(part.seconds for part in parts),
            bytes=sum(part.bytes for part in parts),
            error=errors[0] if errors else None,
            final=any(part.final for part in parts),
        )

    async def fall_back(self, engine: str) -> str | None:
        self._falls[engine] = self._falls.get(engine, 0) + 1
        return self._ways[self._falls[engine]] if self._falls[engine] < len(self._ways) else None

    def close(self) -> None:
        for source in self.sources:
            source.close()
