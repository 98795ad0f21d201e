"""slime's `post` and `get` reach the router of a run, with its key, and other servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_async.compat.slime import http_utils
from miles_async.guests import GUESTS


class Server:
    """Answers with what it received, after a number of failures."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.requests = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="an error of the server")
        if request.path == "/text":
            return web.Response(text="not JSON")
        body = await request.json() if request.can_read_body else None
        return web.json_response({"method": request.method, "body": body, "key": request.headers.get("Authorization")})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(http_utils, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(http_utils, "_keys", {})
    app = web.Application()
    app.router.add_route("*", "/{path}", server.answer)
    async with TestServer(app) as running:
        yield str(running.make_url("/generate"))


async def test_a_request_to_the_router_has_the_key_of_the_run(url: str) -> None:
    GUESTS.find("slime").use_router(url.removesuffix("/generate"), "secret")
    answer = await http_utils.post(url, {"text": "What?"})
    assert answer == {"method": "POST", "body": {"text": "What?"}, "key": "Bearer secret"}
    assert (await http_utils.get(url))["key"] == "Bearer secret"


async def test_a_request_to_another_server_has_no_key(url: str) -> None:
    GUESTS.find("slime").use_router("http://127.0.0.1:1", "secret")
    assert (await http_utils.post(url, None)) == {"method": "POST", "body": {}, "key": None}
    assert (await http_utils.post(url, None, headers={"Authorization": "Basic x"}))["key"] == "Basic x"


async def test_a_request_has_the_method_that_miles_names(url: str) -> None:
    assert (await http_utils.post(url, None, action="delete"))["method"] == "DELETE"


async def test_an_answer_that_is_not_json_is_returned_as_text(url: str) -> None:
    assert await http_utils.get(url.replace("/generate", "/text")) == "not JSON"


async def test_a_request_is_repeated_while_the_server_fails(url: str, server: Server) -> None:
    server.failures = [503, 500]
    assert (await http_utils.post(url, {}))["method"] == "POST"
    assert server.requests == 3


@pytest.mark.parametrize("failures, requests", [([503, 503], 2), ([401], 1)])
async def test_the_last_failure_and_a_refusal_are_raised(
    url: str, server: Server, failures: list[int], requests: int
) -> None:
    server.failures = [*failures]
    with pytest.raises(aiohttp.ClientResponseError, match="an error of the server"):
        await http_utils.post(url, {}, max_retries=2)
    assert server.requests == requests
