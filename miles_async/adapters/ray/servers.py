"""Starts and restarts the servers of engines and router through the Ray actors that own them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from miles_async.adapters.ray.actor_errors import actor_result
from miles_async.adapters.sglang.fleet import Servers
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLostError, MilesError

T = TypeVar("T")
Actor = Any
"""Handle of a `workers.engine.Engine` or `workers.router.Router` actor."""
ANSWER_SECONDS = 10.0
"""Time for the actors of an engine to say whether its servers have ended."""
ACTOR_RESTART_SECONDS = 60.0
"""Time for Ray to restart an actor that died, before the actor begins to start its server."""


async def end_of_engine(parts: Sequence[Actor]) -> str | None:
    """See `Servers.end_of_engine`."""
    with suppress(TimeoutError, MilesError):
        async with asyncio.timeout(ANSWER_SECONDS):
            ends: list[str | None] = await actor_result(asyncio.gather(*(part.end.remote() for part in parts)))
            return next((end for end in ends if end is not None), None)
    return None


async def start_engine(parts: Sequence[Actor], *, restart: bool = False) -> EngineInfo:
    """Start all servers of an engine at once, one per node that it spans; return the address of the first.

    `restart` stops servers that still run before.
    """
    # Servers on several nodes have to agree on ports of the first node before they start.
    rendezvous = await parts[0].rendezvous.remote() if len(parts) > 1 else None
    calls = [(part.restart if restart else part.start).remote(rendezvous) for part in parts]
    infos: list[EngineInfo] = await asyncio.gather(*calls)
    return infos[0]


class RayServers(Servers):
    """The servers of a run.

    Ray restarts an actor that died by itself, without its server. This class starts the server again.
    """

    def __init__(
        self, engines: Mapping[str, Sequence[Actor]], router: Actor | None, router_url: str, start_timeout: float
    ) -> None:
        """`engines` has the actors of each engine, one per node. `router` is None if the run uses an external router.

        `start_timeout` is the time in seconds that a server may take to start.
        """
        self._engines = dict(engines)
        self._router = router
        self._router_url = router_url
        self._timeout = start_timeout + ACTOR_RESTART_SECONDS

    def add(self, engine: str, parts: Sequence[Actor]) -> None:
        """Add an engine; its servers need not run yet."""
        self._engines[engine] = parts

    async def restart_engine(self, engine: str) -> EngineInfo:
        return await self._within_timeout(f"engine {engine}", start_engine(self._engines[engine], restart=True))

    async def end_of_engine(self, engine: str) -> str | None:
        return await end_of_engine(self._engines[engine])

    async def restart_router(self) -> None:
        if self._router is None:
            await super().restart_router()
        else:
            await self._within_timeout("sglang-router", self._router.restart.remote(self._router_url))

    async def _within_timeout(self, server: str, call: Awaitable[T]) -> T:
        """Raise EngineLostError for any failure: a restart is tried again, it does not end the run."""
        try:
            return await asyncio.wait_for(actor_result(call), self._timeout)
        except TimeoutError:
            raise EngineLostError(f"{server} was not restarted within {self._timeout:.0f} s") from None
        except MilesError as error:
            raise EngineLostError(" ".join(str(error).split())) from error
