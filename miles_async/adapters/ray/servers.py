"""The engines and the router as Ray actors that can be told to start their servers anew."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from miles_async.adapters.ray.actor_errors import death_of
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLostError

Actor = Any
"""Handle of a `workers.engine.Engine` or `workers.router.Router` actor."""
PLACED_WITHIN_SECONDS = 60.0
"""How long Ray may take to find a lost actor another process, before its server begins to start."""


async def start_engine(parts: Sequence[Actor], *, anew: bool = False) -> EngineInfo:
    """Start an engine's servers, one per node that it spans, all at once; the first one's tells where it is.

    `anew` ends what is left of them before.
    """
    rendezvous = await parts[0].rendezvous.remote() if len(parts) > 1 else None
    calls = [(part.restart if anew else part.start).remote(rendezvous) for part in parts]
    infos: list[EngineInfo] = await asyncio.gather(*calls)
    return infos[0]


class RayServers:
    """`adapters.sglang.fleet.Processes`. Ray starts an actor that died anew by itself; its server is started here."""

    def __init__(self, engines: Mapping[str, Sequence[Actor]], router: Actor | None, start_timeout: float) -> None:
        """`router` is None where it is somebody else's."""
        self._engines = dict(engines)
        self._router = router
        self._patience = start_timeout + PLACED_WITHIN_SECONDS

    def add(self, engine: str, parts: Sequence[Actor]) -> None:
        self._engines[engine] = parts

    async def restart_engine(self, engine: str) -> EngineInfo:
        info: EngineInfo = await self._answer(f"engine {engine}", start_engine(self._engines[engine], anew=True))
        return info

    async def restart_router(self) -> None:
        if self._router is None:
            raise EngineLostError(
                "the router does not answer and is not ours to start; it is used again when it is back"
            )
        await self._answer("sglang-router", self._router.restart.remote())

    async def _answer(self, what: str, call: Any) -> Any:
        try:
            return await asyncio.wait_for(call, self._patience)
        except TimeoutError:
            raise EngineLostError(f"{what} was not started anew within {self._patience:.0f} s") from None
        except RayTaskError as error:
            raise EngineLostError(" ".join(str(error.cause).split())) from error
        except RayActorError as error:
            raise EngineLostError(death_of(error)) from error
