"""The weight sources of all learner ranks, over the ranks' Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import Fatal, MilesError
from miles_async.types import WriteOutcome

Rank = Any
"""Handle of a `workers.learner.LearnerRank` actor."""


class RaySources:
    """`adapters.weights.channel.Sources`. Raises Fatal when a rank is lost."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    async def meet(self, engines: Sequence[EngineInfo]) -> None:
        await _of_all(rank.meet.remote(list(engines)) for rank in self._ranks)

    async def reach(self, way: str, engine: str) -> None:
        await _of_all(rank.reach.remote(way, engine) for rank in self._ranks)

    async def stage(self, version: int, ways: Sequence[str]) -> None:
        await _of_all(rank.stage.remote(version, list(ways)) for rank in self._ranks)

    async def write(self, version: int, engine: str, way: str) -> list[WriteOutcome]:
        return await _of_all(rank.write.remote(version, engine, way) for rank in self._ranks)


async def _of_all(calls: Any) -> list[Any]:
    """The answers of all ranks, or the failure of one of them as it was raised there."""
    try:
        return list(await asyncio.gather(*calls))
    except RayTaskError as error:
        if isinstance(error.cause, MilesError):
            raise error.cause from None
        raise Fatal(f"a learner rank failed: {type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        raise Fatal(f"a learner rank failed: {str(error).splitlines()[0]}") from error
