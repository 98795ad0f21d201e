"""`ports.WeightChannel` over the learner's weight sources, and the choice of transports.

Every learner rank is a weight source (`source.WeightSource`). It sends its part of the tensors to every engine, so one
send to one engine is a call to all sources. The channel knows which transport each engine uses at the moment and which
transport comes next if a send fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLostError, FatalError, UserError
from miles_async.types import SendOutcome

AUTO_CANDIDATES = ("memory", "p2p", "broadcast")
"""The transports that `auto` measures."""
MEMORY_HANDICAP_SECONDS = 0.010
"""`memory` works on one machine only. If it saves less time than this per publish, `auto` prefers a transport that also
works across machines, so that a small test run exercises the code that clusters use."""
P2P_ADVANTAGE = 1.2
"""Another transport must be faster than p2p by this factor: smaller differences are noise."""
FALLBACKS = ("p2p", "broadcast", "disk")
"""Transports to fall back to if the user named one and it fails for an engine."""

_log = structlog.get_logger(__name__)


class Ranks(Protocol):
    """The learner's ranks, in whichever processes they run. Each of them is a weight source."""

    async def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `connect`, `stage` or `send` of `workers.learner.LearnerRank` on every rank; one result per rank."""
        ...


class Channel:
    """Implements `ports.WeightChannel`.

    `transports` are in order of preference. `address` returns the current address of an engine.
    """

    def __init__(self, transports: Sequence[str], ranks: Ranks, address: Callable[[str], EngineInfo]) -> None:
        self._transports = tuple(transports)
        self._ranks = ranks
        self._address = address
        self._connected: dict[str, EngineInfo] = {}
        self._fallbacks: dict[str, int] = {}
        """By engine, how many times it has fallen back: the index of its transport."""
        self._staged: int | None = None

    @property
    def name(self) -> str:
        return self._transports[0]

    async def connect(self, engines: Sequence[str]) -> None:
        infos = [self._address(engine) for engine in engines]
        # An engine that was restarted has another address. It starts with the preferred transport again.
        fallbacks = {
            info.name: self._fallbacks.get(info.name, 0) for info in infos if self._connected.get(info.name) == info
        }
        transports = {info.name: self._transports[fallbacks.get(info.name, 0)] for info in infos}
        await self._ranks.on_all("connect", infos, transports)
        self._connected, self._fallbacks = {info.name: info for info in infos}, fallbacks

    async def stage(self, version: int) -> None:
        """Raises FatalError if `version` is lower than the staged one: an engine that reports it would be ambiguous."""
        if self._staged is not None and version < self._staged:
            raise FatalError(
                f"weight version {version} was to be staged after version {self._staged}; versions only rise"
            )
        await self._ranks.on_all("stage", version, sorted({self.name, *map(self._transport_of, self._fallbacks)}))
        self._staged = version

    async def send(self, version: int, engine: str) -> SendOutcome:
        """Merge the outcomes of all ranks: the engine has the version only if every rank's part arrived."""
        parts: list[SendOutcome] = await self._ranks.on_all("send", version, engine, self._transport_of(engine))
        errors = [part.error for part in parts if part.error]
        return SendOutcome(
            engine=engine,
            seconds=max(part.seconds for part in parts),
            bytes=sum(part.bytes for part in parts),
            error=errors[0] if errors else None,
            final=any(part.final for part in parts),
        )

    async def fall_back(self, engine: str) -> str | None:
        fallbacks = self._fallbacks.get(engine, 0) + 1
        if fallbacks >= len(self._transports):
            return None
        self._fallbacks[engine] = fallbacks
        return self._transports[fallbacks]

    def _transport_of(self, engine: str) -> str:
        return self._transports[self._fallbacks.get(engine, 0)]


async def find_transports(ranks: Ranks, wanted: str, engines: Sequence[EngineInfo]) -> tuple[str, ...]:
    """Return the transports that work here, best first. Afterwards the engines hold the current weights as version 0.

    `wanted` is `auto` or the name of a transport. `p2p`, the default, falls back to the next of `FALLBACKS` that works,
    with a warning. `auto` measures `AUTO_CANDIDATES` and keeps `disk` as the last one. The engines must be idle.

    Raises UserError if another named transport does not work, EngineLostError if an engine does not answer, and
    FatalError if an engine serves another model or no transport works.
    """
    await ranks.on_all("connect", engines, {})
    await ranks.on_all("stage", 0, [])
    infos = {engine.name: engine for engine in engines}
    if wanted == "auto":
        return await _fastest(ranks, infos)
    # p2p is the default and needs a system library. Without the library a run uses the next transport.
    candidates = FALLBACKS if wanted == "p2p" else (wanted,)
    failures: list[str] = []
    for transport in candidates:
        try:
            await _measure(ranks, transport, infos)
        except EngineLostError as failure:
            failures.append(f"{transport} does not work here: {failure}")
        else:
            for sentence in failures:
                _log.warning(f"weight transport {sentence}; the run uses {transport}")
            return (transport, *(other for other in FALLBACKS if other != transport))
    raise UserError(f"weight_transfer {'; '.join(failures)}")


async def _fastest(ranks: Ranks, infos: Mapping[str, EngineInfo]) -> tuple[str, ...]:
    """The transports that work, fastest first, with `disk` at the end. Raises FatalError if none works."""
    seconds: dict[str, float] = {}
    for transport in AUTO_CANDIDATES:
        try:
            seconds[transport] = await _measure(ranks, transport, infos)
        except EngineLostError as failure:
            _log.info(f"weight transport {transport} does not work here: {failure}")
    if not seconds:
        try:
            await _measure(ranks, "disk", infos)
        except EngineLostError as failure:
            raise FatalError(f"no transport can send weights to the engines; disk failed with: {failure}") from failure
    milliseconds = {transport: round(1e3 * taken, 1) for transport, taken in seconds.items()}
    _log.info("weight transports measured, in milliseconds", **milliseconds)
    return (*by_preference(seconds), "disk")


def by_preference(seconds: Mapping[str, float]) -> list[str]:
    """Sort transports best first by the seconds that a send took; p2p wins near-ties."""

    def cost(transport: str) -> float:
        if transport == "p2p":
            return seconds[transport]
        handicap = MEMORY_HANDICAP_SECONDS if transport == "memory" else 0.0
        return seconds[transport] * P2P_ADVANTAGE + handicap

    return sorted(seconds, key=cost)


async def _measure(ranks: Ranks, transport: str, engines: Mapping[str, EngineInfo]) -> float:
    """Return the seconds of a second send of the staged weights to all engines; the first one also connects.

    Raises EngineLostError if a send fails.
    """
    channel = Channel((transport,), ranks, engines.__getitem__)
    for _ in range(2):
        started = asyncio.get_running_loop().time()
        for outcome in await asyncio.gather(*(channel.send(0, engine) for engine in engines)):
            if outcome.error is not None:
                raise EngineLostError(outcome.error)
        seconds = asyncio.get_running_loop().time() - started
    return seconds
