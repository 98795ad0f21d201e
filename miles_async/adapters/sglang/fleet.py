"""The engines and the router in front of them, over HTTP.

What belongs to a publish goes to each engine's own url, all engines at once; the router is only told who may get
requests. SGLang answers `/pause_generation` when the request to pause is sent, not when the scheduler has stopped, so
each pause is followed by a message that the scheduler answers in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import BadTrajectory, EngineLost
from miles_async.types import EngineLoad


class SGLangFleet:
    """Implements `ports.Fleet`. Create it inside the running loop."""

    def __init__(self, router_url: str, *, timeout: float = 30.0) -> None:
        self._router = router_url
        self._timeout = timeout
        self._client = JsonClient()
        self._known: dict[str, EngineInfo] = {}
        self._routed: dict[str, EngineInfo] = {}

    def routed(self) -> Sequence[str]:
        return tuple(self._routed)

    def urls(self) -> Sequence[str]:
        """The routed engines' own addresses."""
        return tuple(engine.url for engine in self._routed.values())

    def introduce(self, engine: EngineInfo) -> None:
        """Make an engine known under its name, anew after a restart; requests reach it only after `admit`."""
        self._known[engine.name] = engine

    async def pause(self, mode: str) -> None:
        """Stop decoding on every routed engine; one that cannot be stopped is fenced."""

        async def stop(engine: EngineInfo) -> None:
            await self._post(engine, "/pause_generation", {"mode": mode})
            await self._post(engine, "/flush_cache")

        await self._all_or_fence(stop)

    async def commit(self, engine: str, version: int) -> None:
        """Raises EngineLost when the engine kept its cache, or does not report `version` afterwards."""
        info = self._known[engine]
        # The hook in plugin.py lets this succeed while retracted requests wait.
        await self._post(info, "/flush_cache")
        # SGLang aborts what is in flight unless told not to.
        await self._post(info, "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        reported = (await self._client.get(f"{info.url}/model_info", within=self._timeout))["weight_version"]
        if reported != str(version):
            raise EngineLost(f"engine {engine} reports weight version {reported} after being given {version}")

    async def resume(self) -> None:
        """Let every routed engine decode again; one that cannot is fenced."""

        async def go_on(engine: EngineInfo) -> None:
            await self._post(engine, "/continue_generation")

        await self._all_or_fence(go_on)

    async def fence(self, engine: str, reason: str) -> None:
        """Take an engine out of the router and wait until it is out. `reason` is for the caller's event."""
        info = self._routed.pop(engine, None)
        if info is None:
            return
        for worker in await self._workers():
            if worker["url"] == info.url:
                await self._client.request("DELETE", f"{self._router}/workers/{worker['id']}", within=self._timeout)
        await self._until(lambda workers: info.url not in workers, f"did not drop engine {engine}")

    async def admit(self, engine: str) -> None:
        """Let requests reach an engine that holds the current version. Raises EngineLost when the router refuses it."""
        info = self._known[engine]
        # The router adds and drops in the background; a second order for what it has could undo a later drop.
        if all(worker["url"] != info.url for worker in await self._workers()):
            await self._client.post(f"{self._router}/workers", {"url": info.url}, within=self._timeout)
        await self._until(lambda workers: workers.get(info.url, False), f"did not take engine {engine}")
        self._routed[engine] = info

    async def loads(self) -> list[EngineLoad]:
        """How full each routed engine is; one that does not answer is left out, as it is somebody else's to fence."""

        async def ask(engine: EngineInfo) -> list[EngineLoad]:
            try:
                answer = await self._client.get(f"{engine.url}/v1/loads?include=core", within=self._timeout)
            except EngineLost:
                return []
            return [
                EngineLoad(kv_usage=rank["token_usage"], queued=rank["num_waiting_reqs"]) for rank in answer["loads"]
            ]

        answers = await asyncio.gather(*[ask(engine) for engine in self._routed.values()])
        return [load for loads in answers for load in loads]

    async def close(self) -> None:
        await self._client.close()

    async def _post(self, engine: EngineInfo, path: str, body: object = None) -> None:
        """Raises EngineLost also where the engine refuses: it is not in the state that it should be in."""
        try:
            await self._client.post(engine.url + path, body, within=self._timeout)
        except BadTrajectory as refusal:
            raise EngineLost(f"engine {engine.name}: {refusal}") from refusal

    async def _all_or_fence(self, act: Callable[[EngineInfo], Awaitable[None]]) -> None:
        async def guarded(engine: EngineInfo) -> None:
            try:
                await act(engine)
            except EngineLost as lost:
                await self.fence(engine.name, str(lost))

        await asyncio.gather(*[guarded(engine) for engine in self._routed.values()])

    async def _workers(self) -> list[dict[str, str]]:
        answer = await self._client.get(f"{self._router}/workers", within=self._timeout)
        workers: list[dict[str, str]] = answer["workers"]
        return workers

    async def _until(self, reached: Callable[[dict[str, bool]], bool], complaint: str) -> None:
        """The router changes its workers in the background; look until it has."""
        for _ in range(int(self._timeout / 0.05)):
            if reached({worker["url"]: bool(worker["is_healthy"]) for worker in await self._workers()}):
                return
            await asyncio.sleep(0.05)
        raise EngineLost(f"sglang-router {complaint} within {self._timeout:.0f} s")
