"""Requests notice a link that is broken long before their time limit, and wait for a server that is only slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from miles_async.adapters.sglang import client as module
from miles_async.adapters.sglang.client import JsonClient, NoAnswerError, UnavailableError
from miles_async.adapters.system.listeners import _attach, _program

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
DROP_ALL = _program([])


@asynccontextmanager
async def server(*, unplugged: bool) -> AsyncIterator[str]:
    """A server that answers the first request of a connection, and not the second one.

    With `unplugged`, the kernel drops all later packets to it, so it does not even acknowledge them.
    """
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if unplugged:
            _attach(writer.get_extra_info("socket"), DROP_ALL)
        writer.write(ANSWER)
        await ended.wait()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        ended.set()
        listening.close()


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JsonClient]:
    monkeypatch.setattr(module, "LINK_SECONDS", 1)
    made = JsonClient()
    yield made
    await made.close()


async def test_a_request_over_a_broken_link_fails_before_its_time_limit(client: JsonClient) -> None:
    async with server(unplugged=True) as url:
        await client.post(url, within=60)
        with pytest.raises(UnavailableError, match="timed out"):
            await client.post(url, within=60)


async def test_a_request_to_a_server_that_is_slow_has_its_whole_time(client: JsonClient) -> None:
    async with server(unplugged=False) as url:
        await client.post(url, within=60)
        with pytest.raises(NoAnswerError, match=r"no answer within 3 s"):
            await client.post(url, within=3)
