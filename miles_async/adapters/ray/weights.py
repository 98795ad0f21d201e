"""The way of the weights from the learner's ranks to the engines, over the ranks' Ray actors.

Every rank sends its share to every engine, all at once. `auto` is the way that was fastest when tried; the others
follow in the order of what they took, for engines that a write did not reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from ray.exceptions import RayError, RayTaskError

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLost, Fatal, UserError
from miles_async.types import WriteOutcome

Rank = Any
"""Handle of a `workers.learner.LearnerRank` actor."""

MEASURED = ("memory", "p2p", "broadcast")
"""What `auto` tries."""
LAST_RESORTS = ("p2p", "broadcast", "disk")
"""Ways after the one that was asked for by name, in case that an engine cannot be reached by it."""

_log = structlog.get_logger(__name__)


class RayWeightChannel:
    """`ports.WeightChannel`. `ways` are the ways by preference; `address` tells where the engine of a name is now."""

    def __init__(self, ways: Sequence[str], ranks: Sequence[Rank], address: Callable[[str], EngineInfo]) -> None:
        self._ways = tuple(ways)
        self._ranks = ranks
        self._address = address
        self._met: dict[str, EngineInfo] = {}
        self._falls: dict[str, int] = {}
        """How many ways an engine has fallen back."""
        self._staged: int | None = None

    @property
    def name(self) -> str:
        return self._ways[0]

    async def meet(self, engines: Sequence[str]) -> None:
        """Raises EngineLost where one does not answer, cannot be reached or does not fit."""
        infos = [self._address(engine) for engine in engines]
        await _of_all(rank.meet.remote(infos) for rank in self._ranks)
        # One that was started anew has done nothing wrong yet.
        self._falls = {info.name: self._falls.get(info.name, 0) for info in infos if self._met.get(info.name) == info}
        self._met = {info.name: info for info in infos}
        await _of_all(rank.reach.remote(self._way(engine), engine) for rank in self._ranks for engine in engines)

    async def stage(self, version: int) -> None:
        """Raises Fatal where versions would fall: an engine cannot tell new weights of an old number from old ones."""
        if self._staged is not None and version < self._staged:
            raise Fatal(f"weight version {version} was to be staged after version {self._staged}; versions only rise")
        ways = {self.name, *(self._way(engine) for engine in self._falls)}
        await _of_all(rank.stage.remote(version, sorted(ways)) for rank in self._ranks)
        self._staged = version

    async def write(self, version: int, engines: Sequence[str]) -> list[WriteOutcome]:
        return list(await asyncio.gather(*(self._write(version, engine, self._way(engine)) for engine in engines)))

    async def fall_back(self, engine: str) -> str | None:
        falls = self._falls.get(engine, 0) + 1
        if falls >= len(self._ways):
            return None
        self._falls[engine] = falls
        return self._ways[falls]

    async def _write(self, version: int, engine: str, way: str) -> WriteOutcome:
        parts: list[WriteOutcome] = await _of_all(rank.write.remote(version, engine, way) for rank in self._ranks)
        errors = [part.error for part in parts if part.error]
        return WriteOutcome(
            engine=engine,
            seconds=max(part.seconds for part in parts),
            bytes=sum(part.bytes for part in parts),
            error=errors[0] if errors else None,
            final=any(part.final for part in parts),
        )

    def _way(self, engine: str) -> str:
        return self._ways[self._falls.get(engine, 0)]


async def find_ways(ranks: Sequence[Rank], wanted: str, engines: Sequence[EngineInfo]) -> tuple[str, ...]:
    """The ways that weights can take here, best first; the engines then hold the present weights as version 0.

    `wanted` is `auto` or a way's name. The engines must be idle. Raises UserError when a way that was asked for by name
    does not work, with what to do about it.
    """
    known = {engine.name: engine for engine in engines}
    await _of_all(rank.meet.remote(list(engines)) for rank in ranks)
    await _of_all(rank.stage.remote(0, []) for rank in ranks)
    if wanted != "auto":
        try:
            await _seconds(ranks, wanted, known)
        except EngineLost as failure:
            raise UserError(f"weight_transfer {wanted} does not work here: {failure}") from failure
        return (wanted, *(way for way in LAST_RESORTS if way != wanted))
    took: dict[str, float] = {}
    for way in MEASURED:
        try:
            took[way] = await _seconds(ranks, way, known)
        except EngineLost as failure:
            _log.info(f"weights cannot travel by {way} here: {failure}")
    if not took:
        try:
            await _seconds(ranks, "disk", known)
        except EngineLost as failure:
            raise Fatal(f"no way to move weights to the engines works; by disk: {failure}") from failure
    _log.info("ways for weights, in milliseconds", **{way: round(1e3 * seconds, 1) for way, seconds in took.items()})
    return (*sorted(took, key=took.__getitem__), "disk")


async def _seconds(ranks: Sequence[Rank], way: str, engines: Mapping[str, EngineInfo]) -> float:
    """What a write of the staged weights to all engines takes, the second time. Raises EngineLost where it fails."""
    channel = RayWeightChannel((way,), ranks, engines.__getitem__)
    for _ in range(2):
        began = asyncio.get_running_loop().time()
        for outcome in await channel.write(0, list(engines)):
            if outcome.error is not None:
                raise EngineLost(outcome.error)
        took = asyncio.get_running_loop().time() - began
    return took


async def _of_all(calls: Any) -> list[Any]:
    """The answers of all ranks. Raises EngineLost where one says so, Fatal where a rank is lost or fails."""
    try:
        return list(await asyncio.gather(*calls))
    except RayTaskError as error:
        if isinstance(error.cause, EngineLost | Fatal | UserError):
            raise error.cause from None
        raise Fatal(f"a learner rank failed: {type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        raise Fatal(f"a learner rank failed: {str(error).splitlines()[0]}") from error
