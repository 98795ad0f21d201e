"""The weight channel of the pipeline: which way each engine is reached, found out by trying, and what comes after it.

Every source sends its share to every engine, all at once. `auto` is the way that was fastest when tried, of those that
a cluster has; p2p wins near-ties, and the copy within one machine must save more than a moment. The others follow by
what they took, for engines that a write did not reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLostError, FatalError, UserError
from miles_async.types import WriteOutcome

MEASURED = ("memory", "p2p", "broadcast")
"""What `auto` tries."""
SHORTCUT_SECONDS = 0.010
"""What a copy within one machine must save per publish: below that, a laptop had better go the way that clusters go."""
NEAR_TIE = 1.2
"""How much faster than p2p another way must be: less than that is noise, and clusters go by p2p."""
LAST_RESORTS = ("p2p", "broadcast", "disk")
"""Ways after the one that was asked for by name, for an engine that it does not reach."""

_log = structlog.get_logger(__name__)


class Sources(Protocol):
    """All `source.Source`s of the learner, wherever they run; each call is for all of them."""

    async def meet(self, engines: Sequence[EngineInfo]) -> None: ...

    async def reach(self, transport: str, engine: str) -> None: ...

    async def stage(self, version: int, transports: Sequence[str]) -> None:
        """Set the learner's present weights aside and let `ways` prepare them."""
        ...

    async def write(self, version: int, engine: str, transport: str) -> list[WriteOutcome]:
        """One outcome per source."""
        ...


class Channel:
    """`ports.WeightChannel`. `ways` are the ways by preference; `address` tells where the engine of a name is now."""

    def __init__(self, transports: Sequence[str], sources: Sources, address: Callable[[str], EngineInfo]) -> None:
        self._transports = tuple(transports)
        self._sources = sources
        self._address = address
        self._met: dict[str, EngineInfo] = {}
        self._falls: dict[str, int] = {}
        """How many ways an engine has fallen back."""
        self._staged: int | None = None

    @property
    def name(self) -> str:
        return self._transports[0]

    async def meet(self, engines: Sequence[str]) -> None:
        """Raises EngineLostError where one does not answer, cannot be reached or does not fit."""
        infos = [self._address(engine) for engine in engines]
        await self._sources.meet(infos)
        # One that was started anew has done nothing wrong yet.
        self._falls = {info.name: self._falls.get(info.name, 0) for info in infos if self._met.get(info.name) == info}
        self._met = {info.name: info for info in infos}
        for engine in engines:
            await self._sources.reach(self._way(engine), engine)

    async def stage(self, version: int) -> None:
        """Raises Fatal where versions would fall: an engine cannot tell new weights of an old number from old ones."""
        if self._staged is not None and version < self._staged:
            raise FatalError(
                f"weight version {version} was to be staged after version {self._staged}; versions only rise"
            )
        await self._sources.stage(version, sorted({self.name, *map(self._way, self._falls)}))
        self._staged = version

    async def write(self, version: int, engines: Sequence[str]) -> list[WriteOutcome]:
        return list(await asyncio.gather(*(self._write(version, engine) for engine in engines)))

    async def fall_back(self, engine: str) -> str | None:
        falls = self._falls.get(engine, 0) + 1
        if falls >= len(self._transports):
            return None
        self._falls[engine] = falls
        return self._transports[falls]

    async def _write(self, version: int, engine: str) -> WriteOutcome:
        parts = await self._sources.write(version, engine, self._way(engine))
        errors = [part.error for part in parts if part.error]
        return WriteOutcome(
            engine=engine,
            seconds=max(part.seconds for part in parts),
            bytes=sum(part.bytes for part in parts),
            error=errors[0] if errors else None,
            final=any(part.final for part in parts),
        )

    def _way(self, engine: str) -> str:
        return self._transports[self._falls.get(engine, 0)]


async def find_transports(sources: Sources, wanted: str, engines: Sequence[EngineInfo]) -> tuple[str, ...]:
    """The ways that weights can take here, best first; the engines then hold the present weights as version 0.

    `wanted` is `auto` or a way's name. The engines must be idle. Raises UserError when a way that was asked for by name
    does not work, with what to do about it; EngineLostError or Fatal where an engine does not answer or fit.
    """
    await sources.meet(engines)
    await sources.stage(0, [])
    known = {engine.name: engine for engine in engines}
    if wanted != "auto":
        try:
            await _seconds(sources, wanted, known)
        except EngineLostError as failure:
            raise UserError(f"weight_transfer {wanted} does not work here: {failure}") from failure
        return (wanted, *(transport for transport in LAST_RESORTS if transport != wanted))
    took: dict[str, float] = {}
    for transport in MEASURED:
        try:
            took[transport] = await _seconds(sources, transport, known)
        except EngineLostError as failure:
            _log.info(f"weights cannot travel by {transport} here: {failure}")
    if not took:
        try:
            await _seconds(sources, "disk", known)
        except EngineLostError as failure:
            raise FatalError(f"no way to move weights to the engines works; by disk: {failure}") from failure
    _log.info(
        "ways for weights, in milliseconds",
        **{transport: round(1e3 * seconds, 1) for transport, seconds in took.items()},
    )
    return (*by_preference(took), "disk")


def by_preference(took: Mapping[str, float]) -> list[str]:
    """The ways that `auto` tried, best first; `took` are their seconds."""
    handicap = {"p2p": (1.0, 0.0), "broadcast": (NEAR_TIE, 0.0), "memory": (NEAR_TIE, SHORTCUT_SECONDS)}
    return sorted(took, key=lambda transport: took[transport] * handicap[transport][0] + handicap[transport][1])


async def _seconds(sources: Sources, transport: str, engines: Mapping[str, EngineInfo]) -> float:
    """What a write of the staged weights to all engines takes, the second time.

    Raises EngineLostError where it fails.
    """
    channel = Channel((transport,), sources, engines.__getitem__)
    for _ in range(2):
        began = asyncio.get_running_loop().time()
        for outcome in await channel.write(0, list(engines)):
            if outcome.error is not None:
                raise EngineLostError(outcome.error)
        took = asyncio.get_running_loop().time() - began
    return took
