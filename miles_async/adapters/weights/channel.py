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
from miles_async.scheduling.lineage import Lineage
from miles_async.transports import ADAPTER, AUTO, TRANSPORTS
from miles_async.types import SendOutcome

MOST_DIFFERENCE = 0.3
"""Mean difference of log-probabilities, in nats, above which an engine does not compute the learner's model. Rounding
to bfloat16 causes a few hundredths."""
_log = structlog.get_logger(__name__)


class Ranks(Protocol):
    """The learner's ranks, in whichever processes they run. Each of them is a weight source."""

    async def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `workers.learner.LearnerRank` on every rank; one result per rank."""
        ...


class DeviceTurns(Protocol):
    """Gives devices that learner and engines share to one of them; see `pipeline.devices.SharedDevices`."""

    async def to_learner(self) -> None: ...

    async def to_engines(self) -> None: ...


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

    async def connect(self, engines: Sequence[str]) -> None:
        infos = [self._address(engine) for engine in engines]
        # An engine that was restarted has another address. It starts with the preferred transport again.
        fallbacks = {
            info.name: self._fallbacks.get(info.name, 0) for info in infos if self._connected.get(info.name) == info
        }
        transports = {info.name: self._transports[fallbacks.get(info.name, 0)] for info in infos}
        await self._ranks.on_all("connect", infos, transports)
        self._connected, self._fallbacks = {info.name: info for info in infos}, fallbacks

    async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None:
        """Raises FatalError if `version` is lower than the staged one: an engine that reports it would be ambiguous."""
        if self._staged is not None and version < self._staged:
            raise FatalError(
                f"weight version {version} was to be staged after version {self._staged}; versions only rise"
            )
        transports = sorted({self._transports[0], *map(self._transport_of, self._fallbacks)})
        await self._ranks.on_all("stage", version, transports, adapter, lineage)
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

    async def compare(self, engine: str) -> str | None:
        return await _compare(self._ranks, engine)

    async def drop(self, engine: str) -> None:
        await self._ranks.on_all("drop", engine)

    async def fall_back(self, engine: str) -> str | None:
        fallbacks = self._fallbacks.get(engine, 0) + 1
        if fallbacks >= len(self._transports):
            return None
        self._fallbacks[engine] = fallbacks
        return self._transports[fallbacks]

    def _transport_of(self, engine: str) -> str:
        return self._transports[self._fallbacks.get(engine, 0)]


async def find_transports(
    ranks: Ranks, wanted: str, engines: Sequence[EngineInfo], devices: DeviceTurns, adapter: str = ""
) -> tuple[str, ...]:
    """Return the transports that work here, best first. Afterwards the engines hold the current weights as version 0.

    They are those of `adapter` if the run trains several.

    `wanted` is `auto`, `ADAPTER` or the name of a transport. The first fallback that works replaces an optional
    transport that does not work, with a warning. `auto` measures transports and keeps the last fallback as the last
    one. The engines must be idle. If they share `devices` with the learner, the learner has them before and afterwards.

    A warning says if an engine computes other log-probabilities than the learner.

    Raises UserError if another named transport does not work, EngineLostError if an engine does not answer or cannot
    generate, and FatalError if an engine serves another model or no transport works.
    """
    await ranks.on_all("describe")
    await devices.to_engines()
    await ranks.on_all("connect", engines, {})
    await devices.to_learner()
    await ranks.on_all("stage", 0, [], adapter)
    await devices.to_engines()
    infos = {engine.name: engine for engine in engines}
    if wanted == ADAPTER:
        await _measure(ranks, ADAPTER, infos)
        transports: tuple[str, ...] = (ADAPTER,)
    else:
        transports = await (_fastest(ranks, infos) if wanted == AUTO else _working(ranks, wanted, infos))
    for sentence in await asyncio.gather(*(_compare(ranks, engine) for engine in infos)):
        if sentence is not None:
            _log.warning(sentence)
    await devices.to_learner()
    return transports


async def _working(ranks: Ranks, wanted: str, infos: Mapping[str, EngineInfo]) -> tuple[str, ...]:
    """The wanted transport and its fallbacks, best first. Raises UserError if it does not work and is not optional."""
    fallbacks = TRANSPORTS.fallbacks()
    candidates = [wanted, *(other for other in fallbacks if other != wanted and TRANSPORTS.find(wanted).optional)]
    failures: list[str] = []
    for transport in candidates:
        try:
            await _measure(ranks, transport, infos)
        except EngineLostError as failure:
            failures.append(f"{transport} does not work here: {failure}")
        else:
            for sentence in failures:
                _log.warning(f"weight transport {sentence}; the run uses {transport}")
            return (transport, *(other for other in fallbacks if other != transport))
    raise UserError(f"weight_transfer {'; '.join(failures)}")


async def _compare(ranks: Ranks, engine: str) -> str | None:
    """See `ports.WeightChannel.compare`."""
    difference: float | None = (await ranks.on_all("compare", engine))[0]
    if difference is None:
        return None
    _log.debug("engine compared with the learner", engine=engine, nats=difference)
    if difference <= MOST_DIFFERENCE:
        return None
    return (
        f"engine {engine} computes other log-probabilities than the learner with the same weights: they differ by "
        f"{difference:.2g} nats per token. Compare the engine with transformers: SGLang may not compute this model "
        "correctly on this hardware or with these sglang settings"
    )


async def _fastest(ranks: Ranks, infos: Mapping[str, EngineInfo]) -> tuple[str, ...]:
    """The transports that work, fastest first, with the last fallback at the end. Raises FatalError if none works."""
    last, seconds = TRANSPORTS.fallbacks()[-1], dict[str, float]()
    for transport in TRANSPORTS.measured():
        try:
            seconds[transport] = await _measure(ranks, transport, infos)
        except EngineLostError as failure:
            _log.info(f"weight transport {transport} does not work here: {failure}")
    if not seconds:
        try:
            await _measure(ranks, last, infos)
        except EngineLostError as failure:
            sentence = f"no transport can send weights to the engines; {last} failed with: {failure}"
            raise FatalError(sentence) from failure
    milliseconds = {transport: round(1e3 * taken, 1) for transport, taken in seconds.items()}
    _log.info("weight transports measured, in milliseconds", **milliseconds)
    return (*(transport for transport in by_preference(seconds) if transport != last), last)


def by_preference(seconds: Mapping[str, float]) -> list[str]:
    """Sort transports best first by the seconds that a send took; p2p wins near-ties."""
    return sorted(seconds, key=lambda transport: TRANSPORTS.find(transport).cost(seconds[transport]))


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
