"""An engine and a router in one, over HTTP: what `SGLangGenerator` and `SGLangFleet` need of SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

WEIGHTS = 4
"""The version of all tokens."""


class HttpEngine:
    """Answers requests of generation with two tokens; while `held` is set, only an abort ends them, after one token."""

    def __init__(self) -> None:
        self.url = ""
        self.held = False
        self.requests = 0
        """Requests that have arrived."""
        self._aborted = asyncio.Event()
        self._workers: list[dict[str, Any]] = []
        self._version = ""

    async def generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.requests += 1
        if self.held:
            await self._aborted.wait()
        ids, reason = ([7], "abort") if self.held else ([7, 8], "stop")
        meta = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": [{"version": str(WEIGHTS), "start": 0, "end": len(ids)}],
        }
        return web.json_response([{"text": "", "output_ids": ids, "meta_info": meta} for _ in body["input_ids"]])

    async def abort(self, http: web.Request) -> web.Response:
        self._aborted.set()
        return web.json_response({})

    async def workers(self, http: web.Request) -> web.Response:
        return web.json_response({"workers": self._workers})

    async def add_worker(self, http: web.Request) -> web.Response:
        url = (await http.json())["url"]
        self._workers.append({"url": url, "id": "1", "is_healthy": True})
        return web.json_response({})

    async def remove_worker(self, http: web.Request) -> web.Response:
        self._workers.clear()
        return web.json_response({})

    async def set_version(self, http: web.Request) -> web.Response:
        self._version = (await http.json())["new_version"]
        return web.json_response({})

    async def answer(self, http: web.Request) -> web.Response:
        load = {"dp_rank": 0, "token_usage": 0.5, "num_waiting_reqs": 2, "num_running_reqs": 1, "num_used_tokens": 9}
        return web.json_response({"weight_version": self._version, "loads": [load]})


@asynccontextmanager
async def http_engine() -> AsyncIterator[HttpEngine]:
    engine = HttpEngine()
    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", engine.generate),
            web.post("/abort_request", engine.abort),
            web.get("/workers", engine.workers),
            web.post("/workers", engine.add_worker),
            web.delete("/workers/1", engine.remove_worker),
            web.post("/update_weight_version", engine.set_version),
            web.route("*", "/{path:.*}", engine.answer),
        ]
    )
    async with TestServer(app) as server:
        engine.url = str(server.make_url("")).rstrip("/")
        yield engine
