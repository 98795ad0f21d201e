"""A stand-in for SGLang without a model, for measuring the rollout worker.

    python -m benchmarks.fake_engine --port 32000 --latency 0.05

Answers `/generate` like SGLang 0.5 after `latency` seconds. Each sample has 256 tokens (`--tokens`) with
log-probabilities, packed if the request asks for that, and a weight version. With `--text TEXT`, an answer is that text
with one token per byte, and the end-of-sequence token of tiny models. `/abort_request` ends all waiting requests. The
latency can be changed at any time: after `POST /latency {"seconds": 0.2, "spread": 0.5}`, requests take between 0.5 and
1.5 times 0.2 seconds. After `POST /update_weight_version {"new_version": "3"}`, new requests are answered by version 3.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from base64 import b64encode
from typing import Any

import numpy as np
import orjson
import uvloop
from aiohttp import web

from miles_async.adapters.sglang.plugin import PACKED

TOKENS = 256
VERSION = "0"
EOS_ID = 256
"""The end-of-sequence token of tiny models, which have one token per byte."""


def answer(
    request: str, prompt_tokens: int, tokens: int, finish: str = "length", token_text: str = "7"
) -> dict[str, Any]:
    """Return the response for one sample. Log-probabilities have as many digits as those of SGLang."""
    return {
        "text": token_text * tokens,
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


def _saying(text: str) -> dict[str, Any]:
    """Return the response of a model with byte tokens."""
    ids = [*text.encode(), EOS_ID]
    return {**answer("fake", 64, len(ids), "stop"), "output_ids": ids, "text": text}


def _bodies(said: dict[str, Any]) -> tuple[bytes, bytes]:
    """A response as SGLang sends it, and with packed log-probabilities."""
    logprobs = np.array([logprob for logprob, *_ in said["meta_info"]["output_token_logprobs"]], "<f4")
    packed = {"output_token_logprobs": b64encode(logprobs.tobytes()).decode()}
    return orjson.dumps(said), orjson.dumps({**said, "meta_info": {**said["meta_info"], **packed}})


class FakeEngine:
    def __init__(self, latency: float, tokens: int = TOKENS, text: str | None = None, token_text: str = "7") -> None:
        self._latency, self._spread = latency, 0.0
        self._random = random.Random(1)
        self._aborted = asyncio.Event()
        # The responses are serialised only once, so that this process is not the bottleneck of the measurement.
        completed = answer("fake", 64, tokens, token_text=token_text) if text is None else _saying(text)
        self._answers = (completed, answer("fake", 64, 0, "abort"))
        self._bodies = [_bodies(one) for one in self._answers]

    async def generate(self, http: web.Request) -> web.Response:
        request = orjson.loads(await http.read())
        prompts = request["input_ids"]
        packed = str(request.get("rid")).startswith(PACKED)
        aborted, bodies = self._aborted, self._bodies
        body = bodies[0][packed]
        try:
            factor = 1 + self._spread * self._random.uniform(-1, 1)
            await asyncio.wait_for(aborted.wait(), self._latency * factor)
            body = bodies[1][packed]
        except TimeoutError:
            pass
        is_list = isinstance(prompts[0], list)
        content = b"[" + b",".join([body] * len(prompts)) + b"]" if is_list else body
        return web.Response(body=content, content_type="application/json")

    async def abort(self, http: web.Request) -> web.Response:
        self._aborted.set()
        self._aborted = asyncio.Event()
        return web.Response(body=b"{}", content_type="application/json")

    async def latency(self, http: web.Request) -> web.Response:
        order = orjson.loads(await http.read())
        self._latency, self._spread = order["seconds"], order["spread"]
        return web.Response(body=b"{}", content_type="application/json")

    async def version(self, http: web.Request) -> web.Response:
        version = orjson.loads(await http.read())["new_version"]
        for meta in (one["meta_info"] for one in self._answers):
            meta["weight_version"] = version
            meta["weight_versions"] = [{**span, "version": version} for span in meta["weight_versions"]]
        self._bodies = [_bodies(one) for one in self._answers]
        return web.Response(body=b"{}", content_type="application/json")

    async def health(self, http: web.Request) -> web.Response:
        return web.Response()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/latency", self.latency)
        app.router.add_post("/update_weight_version", self.version)
        app.router.add_get("/health", self.health)
        return app


async def serve(port: int, latency: float, tokens: int, text: str | None, token_text: str) -> None:
    # The router probes engines with HTTP/2 first, which aiohttp would log as an error.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    runner = web.AppRunner(FakeEngine(latency, tokens, text, token_text).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds per request (default: 0.05)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens per sample (default: {TOKENS})")
    parser.add_argument("--token-text", default="7", help="text of each token (default: 7)")
    parser.add_argument("--text", help="text of each answer (default: the same token again and again)")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.latency, arguments.tokens, arguments.text, arguments.token_text))


if __name__ == "__main__":
    main()
