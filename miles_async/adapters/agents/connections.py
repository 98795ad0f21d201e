"""Bounds the connections of the endpoint for agents, so that slow and half-sent requests cannot exhaust descriptors.

A connection waits from its beginning, or from the end of a request, until the headers of the next request are complete.
A connection that waits too long is closed, and the one that has waited for the longest time makes room for a new one.
Requests in progress, which may take hours, are not touched: their clients have sent the key.

A request that is not HTTP is answered without its own text, which may contain the key.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

MAX_CONNECTIONS = 8192
"""The process may allow fewer; half of its descriptors stay for the engines, for files and for graders."""
WAIT_SECONDS = 75.0
"""Time limit for the headers of a request. Clients keep idle connections for as long as this to use them again."""
SWEEP_SECONDS = 5.0

MALFORMED = "the request is not valid HTTP"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Connection(web.RequestHandler):
    """aiohttp answers a malformed request with the line that it cannot read, such as that of the key."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        return super().handle_error(
            request, status, exc, MALFORMED if isinstance(exc, HttpProcessingError) else message
        )


class Connections:
    """A factory for the protocols of a server, which aiohttp calls for every new connection."""

    def __init__(self, server: web.Server, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._server = server
        self._wait_seconds = wait_seconds
        self._waiting: dict[web.RequestHandler, float] = {}
        """Since when each connection has waited for headers (the time of the loop), the longest first."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < 2 * MAX_CONNECTIONS:
            allowed = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MAX_CONNECTIONS)
            soft = max(soft, allowed)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.limit = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)
        self._sweeping = asyncio.create_task(self._sweep())

    def __call__(self) -> web.RequestHandler:
        # Connections that were accepted just now are not in the server's list yet.
        while self._waiting and max(len(self._server.connections), len(self._waiting)) >= self.limit:
            self._close(next(iter(self._waiting)))
        connection = self._server()
        connection.__class__ = _Connection  # the server has no setting for the class of its connections
        self._waits(connection)
        return connection

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request. Its connection does not wait meanwhile."""
        connection = request.protocol
        self._waiting.pop(connection, None)
        try:
            return await handler(request)
        finally:
            self._waits(connection)

    def close(self) -> None:
        self._sweeping.cancel()

    def _waits(self, connection: web.RequestHandler) -> None:
        self._waiting[connection] = asyncio.get_running_loop().time()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._wait_seconds))
            for connection, since in list(self._waiting.items()):
                waited = loop.time() - since
                gone = connection.transport is None and waited >= 1.0  # it has none before it is connected
                if gone or waited >= self._wait_seconds:
                    self._close(connection)

    def _close(self, connection: web.RequestHandler) -> None:
        del self._waiting[connection]
        connection.force_close()
