"""The server of an OpenEnv environment answers below the path of its key only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_async.adapters.environments.server import BelowKey

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
