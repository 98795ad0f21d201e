"""The engines and the router in front of them, over HTTP.

What belongs to a publish goes to each engine's own url, all engines at once; the router is only told who may get
requests. SGLang answers `/pause_generation` when the request to pause is sent, not when the scheduler has stopped, so
each pause is followed by a message that the scheduler answers in order.

The router adds and drops workers in the background, and forgets them all when it dies: `check_router` brings its list
in line with the engines that are routed here. An engine that is started anew has another url, so that whatever still
knows the old one reaches nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLostError, TrajectoryError, UserError
from miles_async.events import EngineChanged, Event, RouterChanged
from miles_async.types import EngineLoad


class Processes(Protocol):
    """Whoever owns the servers."""

    async def restart_engine(self, engine: str) -> EngineInfo:
        """End what is left of it, start it anew. Raises EngineLostError when it does not come up."""
        ...

    async def restart_router(self) -> None:
        """Start it anew at its old address. Raises EngineLostError when it does not come up or is not ours."""
        ...


class Unowned:
    """`Processes` of somebody else."""

    async def restart_engine(self, engine: str) -> EngineInfo:
        raise EngineLostError(f"engine {engine} is not ours to start")

    async def restart_router(self) -> None:
        raise EngineLostError("the router does not answer and is not ours to start; it is used again when it is back")


def _untold(event: Event) -> None: ...


class SGLangFleet:
    """Implements `ports.Fleet`. Create it inside the running loop; `tell` hears when an engine comes or goes."""

    def __init__(
        self,
        router_url: str,
        *,
        processes: Processes | None = None,
        tell: Callable[[Event], None] = _untold,
        timeout: float = 30.0,
        health_timeout: float = 30.0,
        colocated: bool = False,
    ) -> None:
        """`colocated` engines must be idle when they leave their devices, and so are never asked for a token."""
        self._router = router_url
        self._processes = processes or Unowned()
        self._tell = tell
        self._timeout = timeout
        self._health_timeout = health_timeout
        self._colocated = colocated
        self._client = JsonClient()
        self._members: dict[str, None] = {}
        """In order of their coming."""
        self._known: dict[str, EngineInfo] = {}
        """Where they are, or were last."""
        self._routed: dict[str, EngineInfo] = {}
        self._joining: dict[str, EngineInfo] = {}
        """Told to the router, which has not taken them yet."""
        self._versions: dict[str, int] = {}
        """What each engine was last given."""
        self._urls: set[str] = set()
        """Of all engines that ever were ours: a router may have others' engines too."""
        self._paused = False
        self._pauses = 0
        self._seen: tuple[bool, int, int] | None = None
        """What the router was like: whether it answered, its engines, the healthy ones."""

    def members(self) -> Sequence[str]:
        return tuple(self._members)

    def enlist(self, engine: str) -> None:
        """Make an engine a member that has yet to be started. Raises UserError where there is one of that name."""
        if engine in self._members:
            raise UserError(f"engine {engine} is a member of the fleet already: give the other one another name")
        self._members[engine] = None

    async def dismiss(self, engine: str) -> None:
        """Remove an engine for good: out of the router, and nobody starts it anew."""
        self._members.pop(engine, None)
        await self.fence(engine, "it was removed")
        self._changed(engine, "lost", "it was removed")

    def routed(self) -> Sequence[str]:
        return tuple(self._routed)

    def urls(self) -> Sequence[str]:
        """The routed engines' own addresses."""
        return tuple(engine.url for engine in self._routed.values())

    def introduce(self, engine: EngineInfo) -> None:
        """Make an engine known under its name, anew after a restart; requests reach it only after `admit`.

        Raises UserError where requests already reach one of that name or at that address.
        """
        for other in (*self._routed.values(), *self._joining.values()):
            if engine.name == other.name or engine.url == other.url:
                raise UserError(
                    f"engine {engine.name} at {engine.url} is a duplicate of engine {other.name} at {other.url}: "
                    "give it a name and an address of its own, or remove the other one first"
                )
        self._members[engine.name] = None
        self._known[engine.name] = engine
        self._urls.add(engine.url)

    def address(self, engine: str) -> EngineInfo:
        return self._known[engine]

    async def pause(self, mode: str) -> None:
        """Stop decoding on every routed engine; one that cannot be stopped is fenced."""
        self._paused, self._pauses = True, self._pauses + 1

        async def stop(engine: EngineInfo) -> None:
            await self._post(engine, "/pause_generation", {"mode": mode})
            await self._post(engine, "/flush_cache")

        await self._all_or_fence(stop)

    async def commit(self, engine: str, version: int) -> None:
        """Raises EngineLostError when the engine kept its cache, or does not report `version` afterwards."""
        info = self._known[engine]
        # The hook in plugin.py lets this succeed while retracted requests wait.
        await self._post(info, "/flush_cache")
        # SGLang aborts what is in flight unless told not to.
        await self._post(info, "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        reported = (await self._client.get(f"{info.url}/model_info", within=self._timeout))["weight_version"]
        if reported != str(version):
            raise EngineLostError(f"engine {engine} reports weight version {reported} after being given {version}")
        self._versions[engine] = version

    async def resume(self) -> None:
        """Let every routed engine decode again; one that cannot is fenced."""

        async def go_on(engine: EngineInfo) -> None:
            await self._post(engine, "/continue_generation")

        await self._all_or_fence(go_on)
        self._paused = False

    async def offload(self) -> None:
        """See `ports.Fleet.offload`. SGLang gives memory up only where it was started with `enable_memory_saver`."""
        self._paused, self._pauses = True, self._pauses + 1

        async def release(engine: EngineInfo) -> None:
            await self._post(engine, "/release_memory_occupation", {})

        await self._all_or_fence(release)

    async def onload(self) -> None:
        async def take(engine: EngineInfo) -> None:
            await self._post(engine, "/resume_memory_occupation", {})

        await self._all_or_fence(take)
        self._paused = False

    async def fence(self, engine: str, reason: str) -> None:
        """Take an engine out of the router and wait until it is out."""
        info = self._routed.pop(engine, None)
        if info is None:
            return
        self._changed(engine, "fenced", reason)
        # A router that is gone sends nobody anything; `check_router` looks again when it is back.
        with suppress(EngineLostError):
            for worker in await self._workers():
                if worker["url"] == info.url:
                    await self._drop(worker["id"])
            await self._until(lambda workers: info.url not in workers, f"did not drop engine {engine}")

    async def admit(self, engine: str) -> None:
        """Let requests reach an engine that holds the current version.

        Raises EngineLostError when the router refuses it.
        """
        info = self._joining[engine] = self._known[engine]
        try:
            # A second order for what it has could undo a later drop.
            if all(worker["url"] != info.url for worker in await self._workers()):
                await self._add(info)
            await self._until(lambda workers: workers.get(info.url, False), f"did not take engine {engine}")
        finally:
            del self._joining[engine]
        self._routed[engine] = info
        self._changed(engine, "routed", None)

    async def check(self, engine: str) -> None:
        """See `ports.Fleet.check`. SGLang answers for a busy engine by the tokens that it draws anyway."""
        info, pauses = self._known[engine], self._pauses
        if self._colocated:
            await self._load_of(info)
            return
        try:
            await self._client.get(f"{info.url}/health_generate", within=self._health_timeout)
        except EngineLostError as lost:
            if not self._paused and pauses == self._pauses:
                raise EngineLostError(f"it drew no token: {lost}") from lost
            # Nothing is drawn during a publish; its scheduler answers all the same.
            await self._load_of(info)

    async def restart(self, engine: str) -> None:
        """See `ports.Fleet.restart`."""
        self._versions.pop(engine, None)
        try:
            info = await self._processes.restart_engine(engine)
            if engine in self._members:
                self.introduce(info)
        except EngineLostError as lost:
            self._changed(engine, "lost", str(lost))
            raise

    async def check_router(self) -> None:
        """See `ports.Fleet.check_router`. A router that is not ours is only waited for."""
        try:
            workers = await self._workers()
        except EngineLostError:
            self._router_seen(None)
            await self._processes.restart_router()
            workers = await self._workers()
        self._router_seen(workers)
        listed = {worker["url"]: worker["id"] for worker in workers}
        wanted = {info.url: info for info in self._routed.values()}
        for info in wanted.values():
            if info.url not in listed:
                await self._add(info)
        joining = {info.url for info in self._joining.values()}
        for url in listed.keys() & self._urls - wanted.keys() - joining:
            await self._drop(listed[url])

    async def loads(self) -> list[EngineLoad]:
        """How full each routed engine is; one that does not answer is left out, as it is somebody else's to fence."""

        async def ask(engine: EngineInfo) -> list[EngineLoad]:
            with suppress(EngineLostError):
                return await self._load_of(engine)
            return []

        answers = await asyncio.gather(*[ask(engine) for engine in self._routed.values()])
        return [load for loads in answers for load in loads]

    async def close(self) -> None:
        await self._client.close()

    async def _load_of(self, engine: EngineInfo) -> list[EngineLoad]:
        answer = await self._client.get(f"{engine.url}/v1/loads?include=core", within=self._timeout)
        return [EngineLoad(kv_usage=rank["token_usage"], queued=rank["num_waiting_reqs"]) for rank in answer["loads"]]

    def _changed(self, engine: str, state: str, reason: str | None) -> None:
        version = self._versions.get(engine)
        self._tell(EngineChanged(time=time.time(), engine=engine, state=state, version=version, reason=reason))

    def _router_seen(self, workers: list[dict[str, str]] | None) -> None:
        healthy = sum(bool(worker["is_healthy"]) for worker in workers or ())
        seen = (workers is not None, len(workers or ()), healthy)
        if seen != self._seen:
            self._seen = seen
            self._tell(RouterChanged(time=time.time(), up=seen[0], engines=seen[1], healthy=healthy))

    async def _post(self, engine: EngineInfo, path: str, body: object = None) -> None:
        """Raises EngineLostError also where the engine refuses: it is not in the state that it should be in."""
        try:
            await self._client.post(engine.url + path, body, within=self._timeout)
        except TrajectoryError as refusal:
            raise EngineLostError(f"engine {engine.name}: {refusal}") from refusal

    async def _all_or_fence(self, act: Callable[[EngineInfo], Awaitable[None]]) -> None:
        async def guarded(engine: EngineInfo) -> None:
            try:
                await act(engine)
            except EngineLostError as lost:
                await self.fence(engine.name, str(lost))

        await asyncio.gather(*[guarded(engine) for engine in self._routed.values()])

    async def _add(self, engine: EngineInfo) -> None:
        await self._client.post(f"{self._router}/workers", {"url": engine.url}, within=self._timeout)

    async def _drop(self, worker: str) -> None:
        # Refused where somebody else dropped it first.
        with suppress(TrajectoryError):
            await self._client.request("DELETE", f"{self._router}/workers/{worker}", within=self._timeout)

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
        raise EngineLostError(f"sglang-router {complaint} within {self._timeout:.0f} s")
