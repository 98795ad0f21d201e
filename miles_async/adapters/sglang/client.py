"""JSON over HTTP to engines and router, with this project's errors."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from miles_async.adapters.sglang.server_key import authorization
from miles_async.errors import EngineLostError, TrajectoryError

Decode = Callable[[bytes], Any]
_TEMPORARY = {408, 425, 429, 503}
"""Answers that depend on the state of the server, not on the request; the same request may succeed later."""
LINK_SECONDS = 10
"""A connection whose packets the other machine has not acknowledged for so long is closed.

A server that is busy or stopped acknowledges packets, because its kernel does that. So this finds broken links and lost
machines long before the time limit of a request, and nothing else."""


class UnavailableError(EngineLostError):
    """The server accepts no connection, closed it without an answer, or refused the request for now (503, 429)."""


class NoAnswerError(EngineLostError):
    """The server accepted the request but has not answered within the time limit."""


class JsonClient:
    """One aiohttp session with orjson: a quarter of a millisecond of CPU per request.

    Create it inside the running event loop.
    """

    def __init__(self) -> None:
        # `Permits` bounds the requests; a limit here would let them wait unseen.
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_open_socket)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def post(
        self, url: str, body: Any = None, *, key: str = "", within: float, decode: Decode | None = None
    ) -> Any:
        """Send a POST request; see `request`."""
        return await self.request("POST", url, body, key=key, within=within, decode=decode)

    async def get(self, url: str, *, key: str = "", within: float) -> Any:
        """Send a GET request; see `request`."""
        return await self.request("GET", url, key=key, within=within)

    async def request(
        self, method: str, url: str, body: Any = None, *, key: str = "", within: float, decode: Decode | None = None
    ) -> Any:
        """Send a request with `body` as JSON; return the decoded answer, or its text if it is not JSON.

        `body` may contain arrays of NumPy.

        `key` is the API key of the server; empty if the server has none. `decode` replaces the decoding of JSON, unless
        it returns None.

        Raises UnavailableError if the server did not take the request, NoAnswerError if there is no answer `within`
        seconds, EngineLostError if the server failed (5xx), and TrajectoryError if it refused the request (4xx), so
        that repeating it cannot help.
        """
        try:
            async with self._session.request(
                method,
                url,
                data=orjson.dumps(body if body is not None else {}, option=orjson.OPT_SERIALIZE_NUMPY),
                headers={"content-type": "application/json", **authorization(key)},
                timeout=aiohttp.ClientTimeout(total=within, sock_connect=min(within, LINK_SECONDS)),
            ) as response:
                content = await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise UnavailableError(f"{method} {url}: no connection within {min(within, LINK_SECONDS):g} s") from error
        except TimeoutError as error:
            raise NoAnswerError(f"{method} {url}: {str(error) or f'no answer within {within:g} s'}") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{method} {url}: {error}") from error
        if response.status in _TEMPORARY:
            raise UnavailableError(f"{method} {url} answered {response.status}: {_start(content)}")
        if response.status >= 500:
            raise EngineLostError(f"{method} {url} answered {response.status}: {_start(content)}")
        if response.status >= 400:
            raise TrajectoryError(f"{method} {url} answered {response.status}: {_start(content)}")
        if decode is not None and (decoded := decode(content)) is not None:
            return decoded
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return content.decode(errors="replace")

    async def close(self) -> None:
        await self._session.close()


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setblocking(False)
    # The first option is for packets that are not acknowledged; the others send packets over an idle connection.
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_SECONDS * 1000)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        opened.setsockopt(socket.IPPROTO_TCP, option, max(1, LINK_SECONDS // 5))
    return opened


def _start(content: bytes) -> str:
    return " ".join(content[:300].decode(errors="replace").split())
