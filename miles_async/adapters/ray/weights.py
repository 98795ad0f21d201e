"""The weight sources of all learner ranks, over the ranks' Ray actors."""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.adapters.ray.ranks import Rank, of_all
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.types import WriteOutcome


class RaySources:
    """`adapters.weights.channel.Sources`. Raises Fatal when a rank is lost."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    async def meet(self, engines: Sequence[EngineInfo]) -> None:
        await of_all(rank.meet.remote(list(engines)) for rank in self._ranks)

    async def reach(self, transport: str, engine: str) -> None:
        await of_all(rank.reach.remote(transport, engine) for rank in self._ranks)

    async def stage(self, version: int, transports: Sequence[str]) -> None:
        await of_all(rank.stage.remote(version, list(transports)) for rank in self._ranks)

    async def write(self, version: int, engine: str, transport: str) -> list[WriteOutcome]:
        return await of_all(rank.write.remote(version, engine, transport) for rank in self._ranks)
