"""`ports.Fleet` over HTTP: the SGLang engines and the router in front of them.

Publishing talks to each engine directly, to all engines at once. The router is involved only in who receives requests.
SGLang answers `/pause_generation` before the scheduler has stopped, so every pause is followed by a request that the
scheduler itself answers, after it has handled the pause.

The router adds and removes engines in the background, and forgets all of them if it dies; `check_router` corrects its
list. Engines may be admitted and fenced during every request, so what a request does is decided just before it. A
restarted engine has another URL, so that requests to the old URL fail instead of reaching an engine whose weights may
be old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from miles_async.adapters.sglang.client import JsonClient
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.errors import EngineLostError, RouterLostError, TrajectoryError, UserError
from miles_async.events import EngineChanged, Event, RouterChanged
from miles_async.types import EngineLoad

IDLE_SECONDS = 10
"""Time for an engine to end the batch whose last answer has arrived already."""
RELEASE = (f"/flush_cache?timeout={IDLE_SECONDS}", "/release_memory_occupation")
"""Requests that release the memory of an engine. SGLang would end if it were not idle yet; the first one waits."""
ALLOCATE = ("/resume_memory_occupation",)
"""Requests that allocate it again."""
MEMORY_SECONDS = 30.0
"""Time limit for each of these requests."""
ROUTER_POLL_SECONDS = 0.05
ROUTER_SECONDS = 10.0
"""A router that has not answered after this time is restarted. It answers within milliseconds, also under load."""


class Servers:
    """The owner of the server processes. This one is for servers that something else started: it restarts nothing."""

    async def restart_engine(self, engine: str) -> EngineInfo:
        """Stop an engine's servers if they still run, and start them. Raises EngineLostError if they do not start."""
        raise EngineLostError(f"engine {engine} was not started by this run; restart it where it was started")

    async def end_of_engine(self, engine: str) -> str | None:
        """Say how and why an engine's server ended. Returns None if all its servers run, or if that is not known."""
        return None

    async def restart_router(self) -> None:
        """Start the router at its previous address.

        Raises EngineLostError if it does not start or does not belong to the run.
        """
        raise EngineLostError(
            "the external router does not answer; start it again, the run uses it as soon as it answers"
        )


def _ignore_event(event: Event) -> None: ...


class StartedEngines:
    """Engines that are in no fleet yet, as a user of devices that the learner shares."""

    def __init__(self, engines: Sequence[EngineInfo]) -> None:
        self._engines = engines

    async def offload(self) -> None:
        """Release the memory of all engines. Raises EngineLostError if one of them does not."""
        await self._ask(RELEASE)

    async def onload(self) -> None:
        """Allocate it again. Raises EngineLostError if an engine does not."""
        await self._ask(ALLOCATE)

    async def _ask(self, paths: Sequence[str]) -> None:
        client = JsonClient()
        try:
            for path in paths:
                asked = (client.post(one.url + path, key=one.key, within=MEMORY_SECONDS) for one in self._engines)
                await asyncio.gather(*asked)
        except TrajectoryError as refusal:
            raise EngineLostError(str(refusal)) from refusal
        finally:
            await client.close()


class SGLangFleet:
    """Implements `ports.Fleet`. Create it inside the running event loop."""

    def __init__(
        self,
        router_url: str,
        *,
        router_key: str = "",
        servers: Servers | None = None,
        emit: Callable[[Event], None] = _ignore_event,
        timeout: float = 30.0,
        health_timeout: float = 30.0,
        colocated: bool = False,
        adapters: bool = False,
        former_urls: Collection[str] = (),
    ) -> None:
        """`router_key` is the API key of the router; empty if it has none.

        `emit` receives an event whenever an engine or the router changes.

        `timeout` is in seconds until the router has added or removed an engine, and until an engine has released or
        allocated memory. `health_timeout` is in seconds until an engine answers any other request, and until a checked
        engine has generated a token.
        `colocated` engines must be idle when they release their devices, so they are never asked to generate a token.
        `adapters` means that versions are adapters: none of them uses prefixes of another, so no cache is dropped.
        `former_urls` are those of engines that the run had before: they are removed from the router.
        """
        self._router = router_url
        self._router_key = router_key
        self._servers = servers or Servers()
        self._emit = emit
        self._timeout = timeout
        self._health_timeout = health_timeout
        self._colocated = colocated
        self._adapters = adapters
        self._client = JsonClient()
        self._members: dict[str, None] = {}
        """An ordered set, in insertion order."""
        self._infos: dict[str, EngineInfo] = {}
        """Current or last address of each engine."""
        self._routed: dict[str, EngineInfo] = {}
        self._joining: dict[str, EngineInfo] = {}
        """Engines that are being added to the router."""
        self._adding: set[str] = set()
        """URLs that the router was asked to add and has not listed since."""
        self._versions: dict[str, int] = {}
        """The version that was committed last on each engine."""
        self._own_urls = set(former_urls)
        """URLs of all engines that ever belonged to this run: an external router may have other engines too."""
        self._paused = False
        self._pauses = 0
        self._router_state: tuple[bool, int, int] | None = None
        """As last reported: whether the router answered, the number of its engines, and of the healthy ones."""
        self._router_serves = False
        """Whether the router answered when it was last asked, and had a routed engine that it considered healthy."""

    def members(self) -> Sequence[str]:
        return tuple(self._members)

    def expect_engine(self, engine: str) -> None:
        """Make an engine a member before it is started. Raises UserError if a member has that name."""
        if engine in self._members:
            raise UserError(f"the fleet already has an engine {engine}: give the new engine another name")
        self._members[engine] = None

    async def dismiss(self, engine: str) -> None:
        """Remove an engine for good: it leaves the router and is not restarted."""
        self._members.pop(engine, None)
        await self.fence(engine, "it was removed")
        self._report_engine(engine, "lost", "it was removed")

    def routed(self) -> Sequence[str]:
        return tuple(self._routed)

    def serving(self) -> bool:
        """See `ports.Fleet.serving`."""
        return bool(self._routed) and self._router_serves

    def engines(self) -> Sequence[EngineInfo]:
        """Return the addresses of the routed engines."""
        return tuple(self._routed.values())

    def register_engine(self, engine: EngineInfo) -> None:
        """Record the address of a started or restarted engine; it receives requests only after `admit`.

        Raises UserError if a routed engine has the same name or URL.
        """
        for other in (*self._routed.values(), *self._joining.values()):
            if engine.name == other.name or engine.url == other.url:
                raise UserError(
                    f"engine {engine.name} at {engine.url} is a duplicate of engine {other.name} at {other.url}: "
                    "give it another name and address, or remove the other engine first"
                )
        self._members[engine.name] = None
        self._infos[engine.name] = engine
        self._own_urls.add(engine.url)

    def address(self, engine: str) -> EngineInfo:
        """Return the current or last address of an engine."""
        return self._infos[engine]

    async def pause(self, mode: str) -> None:
        """See `ports.Fleet.pause`. An engine that cannot be paused is fenced."""
        self._paused, self._pauses = True, self._pauses + 1
        # The scheduler handles its messages in order: its answer to a flush shows that the pause took effect.
        await self._ask_all({"/pause_generation": {"mode": mode}, "/flush_cache": None})

    async def commit(self, engine: str, version: int) -> None:
        """See `ports.Fleet.commit`. Raises EngineLostError even if the engine only refuses to drop its cache."""
        info = self._infos[engine]
        # SGLang answers when its scheduler has the version. Its default is to abort the requests in flight.
        named = self._post(info, "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        # SGLang refuses to flush while retracted requests wait; the hook in `plugin.py` allows it.
        flushed = [] if self._adapters else [self._post(info, "/flush_cache")]
        await asyncio.gather(named, *flushed)
        self._versions[engine] = version

    async def resume(self) -> None:
        """See `ports.Fleet.resume`. An engine that does not resume is fenced."""
        await self._ask_all({"/continue_generation": None})
        self._paused = False

    async def offload(self) -> None:
        """See `ports.Fleet.offload`. SGLang releases memory only if it was started with `enable_memory_saver`."""
        self._paused, self._pauses = True, self._pauses + 1
        await self._ask_all({path: {} for path in RELEASE}, within=self._timeout)

    async def onload(self) -> None:
        """See `ports.Fleet.onload`."""
        await self._ask_all({path: {} for path in ALLOCATE}, within=self._timeout)
        self._paused = False

    async def fence(self, engine: str, reason: str) -> None:
        """See `ports.Fleet.fence`. Returns when the router has removed the engine."""
        # Off the list first: whatever happens to the router's answer, nothing here uses the engine any more.
        info = self._routed.pop(engine, None)
        if info is None:
            return
        self._report_engine(engine, "fenced", reason)
        # A router that is gone sends no requests; `check_router` corrects its list once it answers again.
        with suppress(EngineLostError):
            await self._withdraw(info)

    async def admit(self, engine: str) -> None:
        """See `ports.Fleet.admit`. Returns when the router sends requests to the engine."""
        info = self._joining[engine] = self._infos[engine]
        try:
            # The router queues additions: a second one for the same engine could undo a removal that comes after it.
            if all(worker["url"] != info.url for worker in await self._workers()):
                await self._add(info)
            await self._wait_for_router(lambda workers: workers.get(info.url, False), f"did not take engine {engine}")
        finally:
            del self._joining[engine]
        if engine not in self._members:
            await self._withdraw(info)
            raise EngineLostError(f"engine {engine} was removed while it joined")
        self._routed[engine] = info
        self._router_serves = True
        self._report_engine(engine, "routed", None)

    async def take_over(self, engine: str) -> None:
        """Abort the requests that another rollout worker has left at an engine, then let requests reach it.

        Raises EngineLostError if engine or router does not answer.
        """
        await self._post(self._infos[engine], "/abort_request", {"abort_all": True})
        # If the other rollout worker was lost during a publish, the engine is paused, and the router finds it unhealthy
        # until it generates a token.
        await self._post(self._infos[engine], "/continue_generation")
        await self.admit(engine)

    async def check(self, engine: str) -> None:
        """See `ports.Fleet.check`. SGLang's health check generates a token only if the engine is idle."""
        info = self._infos[engine]
        try:
            if self._colocated:
                await self._require_answer(info)
            else:
                await asyncio.gather(self._require_answer(info), self._require_token(info))
        except EngineLostError as lost:
            if self._infos[engine] is info:  # otherwise another server has taken its place meanwhile
                raise EngineLostError(await self._servers.end_of_engine(engine) or str(lost)) from lost

    async def _require_answer(self, engine: EngineInfo) -> None:
        """Raise EngineLostError if the scheduler, which answers even while it is paused, does not answer in time."""
        try:
            await self._load_of(engine)
        except EngineLostError as lost:
            raise EngineLostError(f"its scheduler does not answer: {lost}") from lost

    async def _require_token(self, engine: EngineInfo) -> None:
        """Raise EngineLostError if the engine generates no token in time, unless a publish pauses it meanwhile."""
        pauses = self._pauses
        try:
            await self._client.get(f"{engine.url}/health_generate", key=engine.key, within=self._health_timeout)
        except EngineLostError as lost:
            if not self._paused and pauses == self._pauses:
                raise EngineLostError(f"it generated no token: {lost}") from lost

    async def restart(self, engine: str) -> None:
        """See `ports.Fleet.restart`."""
        self._versions.pop(engine, None)
        try:
            info = await self._servers.restart_engine(engine)
            # The engine may have been dismissed while it started.
            if engine in self._members:
                self.register_engine(info)
        except EngineLostError as lost:
            self._report_engine(engine, "lost", str(lost))
            raise

    async def check_router(self) -> None:
        """See `ports.Fleet.check_router`. An external router is not restarted: this raises until it answers again."""
        expected = list(self._routed.values())
        try:
            workers = await self._workers()
        except EngineLostError:
            self._report_router(None)
            await self._servers.restart_router()
            self._adding.clear()
            workers = await self._workers()
        self._report_router(workers)
        # Add engines that the router has forgotten; remove those of this run that should not receive requests.
        listed = {worker["url"]: worker["id"] for worker in workers}
        for info in expected:
            if info.url not in listed and self._routed.get(info.name) is info:
                await self._add(info)
        for url in listed.keys() & self._own_urls:
            if all(info.url != url for info in (*self._routed.values(), *self._joining.values())):
                await self._remove(listed[url])

    async def loads(self) -> list[EngineLoad]:
        """See `ports.Fleet.loads`. Engines that do not answer are not fenced here; `check` finds them."""

        async def ask(engine: EngineInfo) -> list[EngineLoad]:
            with suppress(EngineLostError):
                return await self._load_of(engine)
            return []

        answers = await asyncio.gather(*[ask(engine) for engine in self._routed.values()])
        return [load for loads in answers for load in loads]

    async def close(self) -> None:
        await self._client.close()

    async def _load_of(self, engine: EngineInfo) -> list[EngineLoad]:
        url = f"{engine.url}/v1/loads?include=core"
        answer = await self._client.get(url, key=engine.key, within=self._health_timeout)
        return [
            EngineLoad(
                source=f"{engine.url} rank {rank['dp_rank']}",
                kv_usage=rank["token_usage"],
                queued=rank["num_waiting_reqs"],
                # Sums over the decode steps; the last one is the number of tokens. Older versions of SGLang have none.
                generated=int((rank.get("decode_moments") or [0])[-1]),
                held=rank["num_used_tokens"] if rank["num_running_reqs"] else 0,
            )
            for rank in answer["loads"]
        ]

    def _report_engine(self, engine: str, state: str, reason: str | None) -> None:
        version = self._versions.get(engine)
        self._emit(EngineChanged(time=time.time(), engine=engine, state=state, version=version, reason=reason))

    def _report_router(self, workers: list[dict[str, str]] | None) -> None:
        """Emit an event if the router's state has changed. `workers` is its list, or None if it did not answer."""
        routed = {engine.url for engine in self._routed.values()}
        self._router_serves = any(worker["is_healthy"] and worker["url"] in routed for worker in workers or ())
        healthy = sum(bool(worker["is_healthy"]) for worker in workers or ())
        state = (workers is not None, len(workers or ()), healthy)
        if state != self._router_state:
            self._router_state = state
            self._emit(RouterChanged(time=time.time(), up=state[0], engines=state[1], healthy=healthy))

    async def _post(self, engine: EngineInfo, path: str, body: object = None, *, within: float | None = None) -> None:
        """POST to an engine. `within` is in seconds and replaces the health timeout.

        A refusal (4xx) raises EngineLostError too: the engine is in an unexpected state.
        """
        try:
            await self._client.post(engine.url + path, body, key=engine.key, within=within or self._health_timeout)
        except TrajectoryError as refusal:
            raise EngineLostError(f"engine {engine.name}: {refusal}") from refusal

    async def _ask_all(self, bodies: Mapping[str, object], *, within: float | None = None) -> None:
        """POST these bodies, by path and in this order, to all routed engines at once; fence engines that fail."""

        async def ask(engine: EngineInfo) -> None:
            try:
                for path, body in bodies.items():
                    await self._post(engine, path, body, within=within)
            except EngineLostError as lost:
                if self._routed.get(engine.name) is engine:
                    await self.fence(engine.name, str(lost))

        await asyncio.gather(*map(ask, tuple(self._routed.values())))

    async def _withdraw(self, engine: EngineInfo) -> None:
        """Return when the router has removed the engine. Raises EngineLostError if the router does not remove it."""
        if engine.url in self._adding:
            # An addition that takes effect after the removal would undo it.
            await self._wait_for_router(lambda workers: engine.url in workers, f"did not take engine {engine.name}")
        for worker in await self._workers():
            if worker["url"] == engine.url:
                await self._remove(worker["id"])
        await self._wait_for_router(lambda workers: engine.url not in workers, f"did not drop engine {engine.name}")

    async def _add(self, engine: EngineInfo) -> None:
        self._adding.add(engine.url)
        await self._ask_router(
            "POST", "/workers", {"url": engine.url, **({"api_key": engine.key} if engine.key else {})}
        )

    async def _remove(self, worker: str) -> None:
        # The router refuses if the engine is already gone.
        with suppress(TrajectoryError):
            await self._ask_router("DELETE", f"/workers/{worker}")

    async def _workers(self) -> list[dict[str, str]]:
        workers: list[dict[str, str]] = (await self._ask_router("GET", "/workers"))["workers"]
        self._adding -= {worker["url"] for worker in workers}
        return workers

    async def _ask_router(self, method: str, path: str, body: object = None) -> Any:
        try:
            return await self._client.request(
                method, self._router + path, body, key=self._router_key, within=min(ROUTER_SECONDS, self._timeout)
            )
        except EngineLostError as lost:
            raise RouterLostError(f"the router does not answer: {lost}") from lost

    async def _wait_for_router(self, condition: Callable[[dict[str, bool]], bool], failure: str) -> None:
        """Poll the router until `condition` holds for its engines, given as a mapping of URL to whether it is healthy.

        The router changes its list in the background. Raises EngineLostError with `failure` after the timeout.
        """
        for _ in range(int(self._timeout / ROUTER_POLL_SECONDS)):
            if condition({worker["url"]: bool(worker["is_healthy"]) for worker in await self._workers()}):
                return
            await asyncio.sleep(ROUTER_POLL_SECONDS)
        raise EngineLostError(f"sglang-router {failure} within {self._timeout:.0f} s")
