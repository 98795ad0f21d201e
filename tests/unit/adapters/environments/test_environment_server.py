"""What the servers of an environment answer: OpenEnv's below the path of its key, the relay for running tasks."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web

from miles_async.adapters.environments.server import BelowKey, Verifiers

KEY = "a-random-key"


def answers(path: str, kind: str = "http") -> tuple[list[str], list[dict[str, Any]]]:
    """Send a request. Return the paths that reach the application, and what is sent back."""
    reached: list[str] = []
    sent: list[dict[str, Any]] = []

    async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        assert scope["raw_path"].decode() == scope["path"]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "raw_path": path.encode()}
    asyncio.run(BelowKey(application, KEY)(scope, send, send))
    return reached, sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_application_sees_the_path_below_the_key(kind: str) -> None:
    assert answers(f"/{KEY}/reset", kind) == (["/reset"], [])
    assert answers(f"/{KEY}", kind) == (["/"], [])


@pytest.mark.parametrize("path", ["/", "/reset", "/another-key/reset", f"/x{KEY}/reset", ""])
def test_requests_without_the_key_reach_nothing(path: str) -> None:
    reached, [start, body] = answers(path)
    assert (reached, start["status"], body["body"]) == ([], 404, b"")
    reached, [close] = answers(path, "websocket")
    assert (reached, close["type"]) == ([], "websocket.close")


async def test_the_relay_answers_only_model_requests_of_a_running_task() -> None:
    keys: list[str | None] = []

    async def endpoint(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.json_response({"path": request.path})

    app = web.Application()
    app.router.add_post("/{path:.*}", endpoint)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    verifiers = object.__new__(Verifiers)
    # Only the library itself is left out.
    verifiers.env = SimpleNamespace(serving=lambda: nullcontext())
    verifiers._urls = {"running": f"http://127.0.0.1:{runner.addresses[0][1]}/sessions/1"}
    async with verifiers.serving(), ClientSession(headers={"Authorization": "Bearer key"}) as client:
        address = f"{verifiers._relay}/chat/completions"
        for headers, status in (({"X-Session-ID": "running"}, 200), ({"X-Session-ID": "another"}, 404), ({}, 404)):
            async with client.post(address, headers=headers) as answer:
                assert answer.status == status
        async with client.get(address, headers={"X-Session-ID": "running"}) as answer:
            assert answer.status == 405
    await runner.cleanup()
    assert keys == ["Bearer key"]
