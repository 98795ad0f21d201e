"""The requests of the generator to an engine that does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.types import Group, Sample
from tests.unit.byte_tokenizer import Bytes


async def test_the_engines_stop_working_on_a_request_that_was_cancelled() -> None:
    begun, asked, aborted = asyncio.Event(), [], asyncio.Queue[Any]()

    async def generate(http: web.Request) -> web.Response:
        asked.append(await http.json())
        begun.set()
        await asyncio.Event().wait()
        return web.Response()

    async def abort(http: web.Request) -> web.Response:
        await aborted.put(await http.json())
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/abort_request", abort)])
    async with TestServer(app, handler_cancellation=True) as engine:
        url = str(engine.make_url("")).rstrip("/")
        engines = [EngineInfo("engine", url, 0, 1)]
        generator = SGLangGenerator(
            url, Bytes(), SamplingParams(max_new_tokens=9), limit=lambda: 4, engines=lambda: engines
        )
        group = Group([Sample(tokens=[1])])
        generating = asyncio.create_task(generator.generate(group))
        await begun.wait()
        generating.cancel()
        assert await aborted.get() == {"rid": asked[0]["rid"] + "_0"}
        await generator.close()
        assert generator.in_flight == 0
        assert group[0].tokens == [1]
