"""The fleet, with engines and routers that answer, are slow, or are gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from miles_async.adapters.sglang.fleet import Servers, SGLangFleet, StartedEngines
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.system.network_ports import ClaimedPort, claim_port
from miles_async.errors import EngineLostError, UserError


class Server:
    """Answers each `"METHOD /path"` as `answers` defines, an exception with status 503; answers nothing else."""

    def __init__(self, answers: dict[str, object]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.was_asked = asyncio.Event()

    async def answer(self, request: str, body: str) -> object:
        return self.answers.get(request)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            method, path, _ = line.decode().split()
            while (header := await reader.readline()).strip():
                if header.lower().startswith(b"content-length:"):
                    size = int(header.split(b":")[1])
            body = (await reader.readexactly(size)).decode()
            self.asked.append(f"{method} {path} {body}".removesuffix(" {}"))
            self.was_asked.set()
            if (answer := await self.answer(f"{method} {path}", body)) is None:
                await reader.read()  # until the asker gives up
                return
            status = b"503 Service Unavailable" if isinstance(answer, Exception) else b"200 OK"
            text = json.dumps(str(answer) if isinstance(answer, Exception) else answer).encode()
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(text)) + text)


@asynccontextmanager
async def serving(answers: dict[str, object]) -> AsyncIterator[tuple[str, Server]]:
    server = Server(answers)
    async with listening(server) as url:
        yield url, server


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
    await listener.wait_closed()  # from Python 3.12 on also for the connections, which the event loop would leave open


IDLE_RANK = {
    "dp_rank": 0,
    "token_usage": 0.0,
    "num_waiting_reqs": 0,
    "num_running_reqs": 0,
    "num_used_tokens": 0,
    "decode_moments": None,
}
"""The load of a rank that has done nothing yet."""


async def test_each_rank_of_an_engine_reports_its_load_and_the_tokens_since_its_start() -> None:
    busy = {"token_usage": 0.5, "num_waiting_reqs": 3, "num_running_reqs": 2, "num_used_tokens": 50}
    decoded = {"decode_moments": [2.0, 8.0, 1.0, 32.0, 4.0, 8.0]}
    cached = {"dp_rank": 1, "num_used_tokens": 20}
    older = {name: value for name, value in IDLE_RANK.items() if name != "decode_moments"} | {"dp_rank": 2}
    answer = {"loads": [IDLE_RANK | busy | decoded, IDLE_RANK | cached, older]}
    async with serving({"GET /v1/loads?include=core": answer}) as (url, _):
        fleet = SGLangFleet(url)
        fleet.register_engine(EngineInfo("e", url, 0, 1))
        loads = await fleet._load_of(fleet.address("e"))
        await fleet.close()
    assert [(load.kv_usage, load.queued, load.generated) for load in loads] == [(0.5, 3, 8), (0.0, 0, 0), (0.0, 0, 0)]
    assert [load.held for load in loads] == [50, 0, 0], "tokens that are only cached do not count"
    assert len({load.source for load in loads}) == 3


async def test_an_engine_that_generates_no_token_is_lost_unless_it_is_paused() -> None:
    idle = {"loads": [IDLE_RANK]}
    answers: dict[str, object] = {"GET /v1/loads?include=core": idle, "GET /health_generate": TimeoutError("no token")}
    async with serving(answers) as (url, _):
        fleet = SGLangFleet("http://127.0.0.1:1")
        fleet.register_engine(EngineInfo("e", url, 0, 1))
        with pytest.raises(EngineLostError, match=r"it generated no token: GET http.* answered 503: .*no token"):
            await fleet.check("e")
        await fleet.pause("retract")
        await fleet.check("e")
        await fleet.resume()
        with pytest.raises(EngineLostError, match="it generated no token"):
            await fleet.check("e")
        await fleet.close()


async def test_an_engine_whose_scheduler_does_not_answer_is_lost_after_one_timeout_although_a_publish_begins() -> None:
    answers: dict[str, object] = {"POST /flush_cache": {}, "GET /workers": {"workers": []}}
    async with serving(answers) as (url, _):
        fleet = SGLangFleet(url, health_timeout=0.3)
        fleet.register_engine(EngineInfo("e", url, 0, 1))
        checked = asyncio.ensure_future(fleet.check("e"))
        await asyncio.sleep(0.1)
        paused = asyncio.ensure_future(fleet.pause("retract"))
        with pytest.raises(EngineLostError, match=r"its scheduler does not answer: GET .* no answer within 0\.3 s$"):
            await checked
        await paused
        await fleet.close()


async def test_an_engine_that_a_lost_rollout_worker_left_paused_is_resumed_without_its_requests() -> None:
    async with serving({"POST /abort_request": {}, "POST /continue_generation": {}}) as (url, server):
        listed = {"url": url, "id": "1", "is_healthy": False}
        server.answers["GET /workers"] = {"workers": [listed]}
        fleet = SGLangFleet(url)
        fleet.register_engine(EngineInfo("e", url, 0, 1))
        taken_over = asyncio.ensure_future(fleet.take_over("e"))
        while "POST /continue_generation" not in server.asked:
            server.was_asked.clear()
            await server.was_asked.wait()
        assert server.asked[:2] == ['POST /abort_request {"abort_all":true}', "POST /continue_generation"]
        assert fleet.routed() == ()
        listed["is_healthy"] = True
        await taken_over
        assert fleet.routed() == ("e",)
        await fleet.close()


async def test_the_worker_list_of_a_router_is_corrected_without_removing_engines_of_others() -> None:
    async with serving({"POST /workers": {}, "DELETE /workers/2": {}}) as (url, router):
        fleet = SGLangFleet(url)
        for number in (1, 2):
            fleet.register_engine(EngineInfo(f"e{number}", f"http://127.0.0.1:{number}", 0, 1))
        both = [{"url": f"http://127.0.0.1:{number}", "id": str(number), "is_healthy": True} for number in (1, 2, 3)]
        router.answers["GET /workers"] = {"workers": both}
        await fleet.admit("e1")
        router.answers["GET /workers"] = {"workers": both[1:]}
        await fleet.check_router()
        assert router.asked[-2:] == ['POST /workers {"url":"http://127.0.0.1:1"}', "DELETE /workers/2"]
        await fleet.close()


async def test_the_run_waits_for_an_external_router_that_is_gone() -> None:
    fleet = SGLangFleet("http://127.0.0.1:1")
    with pytest.raises(EngineLostError, match=r"^the external router does not answer; start it again"):
        await fleet.check_router()
    await fleet.close()


def test_a_claimed_port_is_not_assigned_twice() -> None:
    claimed = claim_port()
    with pytest.raises(OSError, match="in use"):
        ClaimedPort(claimed.number)
    claimed.release()
    ClaimedPort(claimed.number).release()


async def test_a_duplicate_engine_is_refused() -> None:
    router: dict[str, object] = {
        "GET /workers": {"workers": [{"id": "1", "url": "http://127.0.0.1:7", "is_healthy": True}]}
    }
    async with serving(router) as (url, _):
        fleet = SGLangFleet(url)
        fleet.register_engine(EngineInfo("e", "http://127.0.0.1:7", 0, 1))
        await fleet.admit("e")
        for name, port in (("e", 8), ("other", 7)):
            with pytest.raises(UserError, match=rf"engine {name} at .*:{port} is a duplicate of engine e at .*:7"):
                fleet.register_engine(EngineInfo(name, f"http://127.0.0.1:{port}", 0, 1))
        with pytest.raises(UserError, match="the fleet already has an engine e"):
            fleet.expect_engine("e")
        assert fleet.members() == ("e",)
        await fleet.close()


class Router(Server):
    """Lists engines as sglang-router does: an addition takes effect some listings later than it is asked for.

    The next addition is answered when `go_on` is set.
    """

    LISTINGS_UNTIL_ADDED = 3

    def __init__(self) -> None:
        super().__init__({})
        self.engines: list[str] = []
        self.queued: list[str] = []
        self.listings = 0
        self.asked_to_add, self.go_on = asyncio.Event(), asyncio.Event()

    def forget_engines(self) -> None:
        self.engines.clear()

    def take_queued(self) -> None:
        self.engines += self.queued
        self.queued.clear()

    async def answer(self, request: str, body: str) -> object:
        method, _, path = request.partition(" /workers")
        self.listings += method == "GET"
        if self.listings >= self.LISTINGS_UNTIL_ADDED:
            self.take_queued()
        if method == "POST":
            self.listings = 0
            self.queued.append(json.loads(body)["url"])
            self.asked_to_add.set()
            await self.go_on.wait()
        elif method == "DELETE":
            self.engines.remove(f"http://127.0.0.1:{path.removeprefix('/')}")
        return {
            "workers": [{"url": url, "id": url.rpartition(":")[2], "is_healthy": True} for url in self.engines],
        }


@asynccontextmanager
async def routed_fleet(*engines: str) -> AsyncIterator[tuple[SGLangFleet, Router]]:
    """A fleet with these engines, whose URLs are ports 1, 2 and so on. The next addition waits for `go_on`."""
    router = Router()
    async with listening(router) as url:
        fleet = SGLangFleet(url)
        for number, engine in enumerate(engines, 1):
            fleet.register_engine(EngineInfo(engine, f"http://127.0.0.1:{number}", 0, 1))
            router.engines.append(f"http://127.0.0.1:{number}")
            await fleet.admit(engine)
        yield fleet, router
        await fleet.close()


async def test_the_engines_that_the_run_had_before_leave_the_router() -> None:
    async with listening(router := Router()) as url:
        router.engines += ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        fleet = SGLangFleet(url, former_urls={"http://127.0.0.1:2"})
        await fleet.check_router()
        assert router.engines == ["http://127.0.0.1:1"], "another run may use the same router"
        await fleet.close()


async def test_an_engine_that_is_fenced_while_the_list_of_the_router_is_corrected_stays_out_of_the_router() -> None:
    async with routed_fleet("first", "second") as (fleet, router):
        router.forget_engines()
        checked = asyncio.ensure_future(fleet.check_router())
        await router.asked_to_add.wait()
        await fleet.fence("second", "it holds old weights")
        router.go_on.set()
        await checked
        router.take_queued()
        assert router.engines == ["http://127.0.0.1:1"]


async def test_fencing_an_engine_waits_for_an_addition_that_the_router_has_not_made_yet() -> None:
    async with routed_fleet("first") as (fleet, router):
        router.forget_engines()
        router.go_on.set()
        await fleet.check_router()
        await fleet.fence("first", "it holds old weights")
        router.take_queued()
        assert router.engines == []


async def test_an_engine_that_joins_while_the_list_of_the_router_is_corrected_stays_in_the_router() -> None:
    async with routed_fleet("first") as (fleet, router):
        router.forget_engines()
        fleet.register_engine(EngineInfo("second", "http://127.0.0.1:2", 0, 1))
        router.engines.append("http://127.0.0.1:2")
        joining = asyncio.ensure_future(fleet.admit("second"))
        checked = asyncio.ensure_future(fleet.check_router())
        await asyncio.gather(router.asked_to_add.wait(), joining)
        router.go_on.set()
        await checked
        router.take_queued()
        assert sorted(router.engines) == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


async def test_an_engine_that_is_removed_while_it_joins_leaves_the_router() -> None:
    async with routed_fleet() as (fleet, router):
        fleet.register_engine(EngineInfo("first", "http://127.0.0.1:1", 0, 1))
        joining = asyncio.ensure_future(fleet.admit("first"))
        await router.asked_to_add.wait()
        await fleet.dismiss("first")
        router.take_queued()
        router.go_on.set()
        with pytest.raises(EngineLostError, match="engine first was removed while it joined"):
            await joining
        assert (list(fleet.routed()), router.engines) == ([], [])


async def test_a_failed_check_says_why_the_server_of_the_engine_ended() -> None:
    class Ended(Servers):
        async def end_of_engine(self, engine: str) -> str | None:
            return f"the server of {engine} ended with code 1"

    fleet = SGLangFleet("http://127.0.0.1:1", servers=Ended(), health_timeout=0.2)
    fleet.register_engine(EngineInfo("e", "http://127.0.0.1:2", 0, 1))
    with pytest.raises(EngineLostError, match="the server of e ended with code 1"):
        await fleet.check("e")
    await fleet.close()


async def test_a_failed_check_of_a_server_that_was_replaced_meanwhile_does_not_count() -> None:
    async with serving({}) as (url, server):
        fleet = SGLangFleet("http://127.0.0.1:1", health_timeout=0.2)
        fleet.register_engine(EngineInfo("e", url, 0, 1))
        checked = asyncio.ensure_future(fleet.check("e"))
        await server.was_asked.wait()
        fleet.register_engine(EngineInfo("e", "http://127.0.0.1:2", 0, 1))
        await checked
        await fleet.close()


async def test_engines_wait_until_they_are_idle_before_they_release_their_memory() -> None:
    paths = ["/flush_cache?timeout=10", "/release_memory_occupation", "/resume_memory_occupation"]
    async with serving({f"POST {path}": {} for path in paths}) as (url, server):
        engines = StartedEngines([EngineInfo("e", url, 0, 1)])
        await engines.offload()
        await engines.onload()
    assert server.asked == [f"POST {path}" for path in paths]


async def test_engines_that_do_not_release_their_memory_are_lost() -> None:
    async with serving({"POST /flush_cache?timeout=10": RuntimeError("busy")}) as (url, _):
        with pytest.raises(EngineLostError, match=r"flush_cache.* answered 503: .*busy"):
            await StartedEngines([EngineInfo("e", url, 0, 1)]).offload()
