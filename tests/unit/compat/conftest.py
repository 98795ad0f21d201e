"""The router and the arguments of a run in tests of examples of slime and Miles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.compat.slime import http_utils
from miles_async.rollout.contract import Arguments, flat_args
from miles_async.rollout.sample_service import SampleService
from tests.configuration import run_config

KEY = "the key of the router"


class Characters:
    """A tokenizer with one token per character, in the form of the library transformers."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Router:
    """Answers each request with the next text, sampled by weight version 7, if the request has the key."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        text = self._texts.pop(0)
        sampled = [[-0.5, ord(letter), letter] for letter in text]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "7", "output_token_logprobs": sampled}
        return web.json_response({"text": text, "meta_info": meta})


@pytest.fixture
async def arguments(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[list[str]], Any]]:
    """Makes the arguments of a run whose engines give these answers."""
    monkeypatch.setattr(http_utils, "_keys", {})
    servers = []

    async def make(texts: list[str]) -> Arguments:
        app = web.Application()
        app.router.add_post("/generate", Router(texts).answer)
        servers.append(server := TestServer(app))
        await server.start_server()
        http_utils.use_router(str(server.make_url("/")), KEY)
        return flat_args(
            run_config("--rollout-max-context-len", "8192"),
            sglang_router_ip=server.host,
            sglang_router_port=server.port,
            sample_service=SampleService(SamplingParams(max_new_tokens=64), max_attempts=1),
            tokenizer=SimpleNamespace(transformers=Characters()),
        )

    yield make
    await asyncio.gather(*(server.close() for server in servers))
