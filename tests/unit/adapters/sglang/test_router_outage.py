"""The generator and the fleet tell an outage of the router from a lost engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.system.network_ports import claim_port
from miles_async.errors import EngineLostError, RouterLostError
from miles_async.types import Group, Sample

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
GONE = EngineInfo("e", "http://127.0.0.1:1", 0, 1)


class NoTokenizer:
    """The tests give token ids."""

    def encode(self, prompt: object, tools: object = None) -> list[int]:
        raise AssertionError

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


@asynccontextmanager
async def router(answer: Answer, port: int = 0) -> AsyncIterator[str]:
    """A router that answers every request with `answer`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def error_of(url: str) -> EngineLostError:
    """The error of one request to a router."""
    generator = SGLangGenerator(
        url, NoTokenizer(), SamplingParams(max_new_tokens=4), limit=lambda: 4, engines=lambda: ()
    )
    try:
        with pytest.raises(EngineLostError) as caught:
            await generator.generate(Group([Sample(tokens=[1, 2])]))
        assert generator.requests.in_flight == 0
        return caught.value
    finally:
        await generator.close()


async def test_a_router_that_refuses_connections_does_not_count_as_a_lost_engine() -> None:
    assert isinstance(await error_of("http://127.0.0.1:1"), RouterLostError)


async def test_a_router_that_dies_during_a_request_does_not_count_as_a_lost_engine() -> None:
    async def closes(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with router(closes) as url:
        assert isinstance(await error_of(url), RouterLostError)


@pytest.mark.parametrize("status, router_lost", [(503, True), (429, True), (500, False), (502, False)])
async def test_only_answers_about_a_failed_engine_count_as_its_loss(status: int, router_lost: bool) -> None:
    """The router answers 503 if it has no engine to send a request to, and 500 if the engine failed."""

    async def answers(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=status)

    async with router(answers) as url:
        assert isinstance(await error_of(url), RouterLostError) is router_lost


async def test_a_fleet_serves_while_the_router_answers_and_has_a_healthy_routed_engine() -> None:
    listed = [{"id": "1", "url": GONE.url, "is_healthy": True}]

    async def workers(request: web.Request) -> web.StreamResponse:
        return web.json_response({"workers": listed})

    port = claim_port()
    fleet = SGLangFleet(f"http://127.0.0.1:{port.number}", timeout=5)
    fleet.register_engine(GONE)
    assert not fleet.serving()
    async with router(workers, port.number):
        await fleet.admit("e")
        assert fleet.serving()
        listed[0]["is_healthy"] = False
        await fleet.check_router()
        assert not fleet.serving(), "the router has no healthy engine"
        listed[0]["is_healthy"] = True
        await fleet.check_router()
        assert fleet.serving()
    with pytest.raises(EngineLostError):
        await fleet.check_router()
    assert not fleet.serving(), "the router does not answer"
    async with router(workers, port.number):
        await fleet.check_router()
        assert fleet.serving()
        listed.clear()
        await fleet.fence("e", "the test fences it")
        assert not fleet.serving(), "no engine is routed"
    await fleet.close()
    port.release()
