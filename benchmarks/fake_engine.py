"""What SGLang answers, without a model: for measuring who asks.

    python -m benchmarks.fake_engine --port 32000 --latency 0.05

Answers `/generate` for lists of prompts as SGLang 0.5 does, with 256 tokens, their log-probabilities and weight
versions per sample, after `latency` seconds; `/abort_request` ends what waits. Latency can be set while it runs:
`POST /latency {"seconds": 0.2, "spread": 0.5}` takes between half and one and a half times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

import orjson
import uvloop
from aiohttp import web

TOKENS = 256
VERSION = "0"


def answer(request: str, prompt_tokens: int, tokens: int, finish: str = "length") -> dict[str, Any]:
    """One sample's part of an answer. Log-probabilities have as many digits as the real ones."""
    return {
        "text": "7" * tokens,
        "output_ids": [55] * tokens,
        "meta_info": {
            "id": request,
            "finish_reason": {"type": finish, "length": tokens},
            "prompt_tokens": prompt_tokens,
            "weight_version": VERSION,
            "weight_versions": [{"version": VERSION, "start": 0, "end": tokens}] if tokens else [],
            "output_token_logprobs": [[-0.1234567891234567 * (1 + i), 55, None] for i in range(tokens)],
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "e2e_latency": 0.05123456789,
        },
    }


class FakeEngine:
    def __init__(self, latency: float) -> None:
        self._latency, self._spread = latency, 0.0
        self._random = random.Random(1)
        self._aborted = asyncio.Event()
        # Written once: this process must not be what is measured.
        self._whole = orjson.dumps(answer("fake", 64, TOKENS))
        self._cut = orjson.dumps(answer("fake", 64, 0, "abort"))

    async def generate(self, http: web.Request) -> web.Response:
        request = orjson.loads(await http.read())
        prompts = request["input_ids"]
        aborted, body = self._aborted, self._whole
        try:
            factor = 1 + self._spread * self._random.uniform(-1, 1)
            await asyncio.wait_for(aborted.wait(), self._latency * factor)
            body = self._cut
        except TimeoutError:
            pass
        many = isinstance(prompts[0], list)
        content = b"[" + b",".join([body] * len(prompts)) + b"]" if many else body
        return web.Response(body=content, content_type="application/json")

    async def abort(self, http: web.Request) -> web.Response:
        self._aborted.set()
        self._aborted = asyncio.Event()
        return web.Response(body=b"{}", content_type="application/json")

    async def latency(self, http: web.Request) -> web.Response:
        order = orjson.loads(await http.read())
        self._latency, self._spread = order["seconds"], order["spread"]
        return web.Response(body=b"{}", content_type="application/json")

    async def health(self, http: web.Request) -> web.Response:
        return web.Response()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/latency", self.latency)
        app.router.add_get("/health", self.health)
        return app


async def serve(port: int, latency: float) -> None:
    runner = web.AppRunner(FakeEngine(latency).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds per request")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.latency))


if __name__ == "__main__":
    main()
