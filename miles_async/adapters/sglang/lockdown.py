"""Closes what SGLang leaves open although it has a key: to web pages, to readers of logs, and on other ports.

Runs inside SGLang's processes, hooked in by `plugin.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from miles_async.adapters.system.listeners import confined_listeners

BootstrapServer = Any
"""`sglang.srt.entrypoints.engine_info_bootstrap_server.EngineInfoBootstrapServer`."""

_bootstrap_servers: list[BootstrapServer] = []


def remember_bootstrap_server(_: None, server: BootstrapServer, *__: Any, **___: Any) -> None:
    """Remember the server where ranks register the addresses of their weights, for `protect_server`."""
    _bootstrap_servers.append(server)


def protect_server(*_: Any, **__: Any) -> None:
    """Prepare SGLang's HTTP server before it listens; all ranks have started then.

    - SGLang allows web pages of all origins to read its answers. Without its CORS middleware, browsers allow none.
    - SGLang checks the key of HTTP requests but not of WebSocket connections, so their routes are removed.
    - The server where ranks register checks no key, so that another process could replace the address that the weights
      are written to. No rank registers later, so the registrations are frozen.
    """
    from sglang.srt.entrypoints.http_server import CORSMiddleware, app

    app.user_middleware = [middleware for middleware in app.user_middleware if middleware.cls is not CORSMiddleware]
    app.router.routes = [route for route in app.router.routes if type(route).__name__ != "APIWebSocketRoute"]
    for server in _bootstrap_servers:
        server.transfer_engine_info = MappingProxyType(server.transfer_engine_info)


def hide_keys(arguments: dict[str, Any], *_: Any) -> dict[str, Any]:
    """Remove the key from the arguments that SGLang logs and answers to `/server_info`."""
    return arguments | {"api_key": None, "admin_api_key": None}


def confine_scheduler(original: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
    """Wrap `Scheduler.__init__`: confine the ports of Mooncake and torch.distributed to the address of the engine."""
    with confined_listeners(os.environ["SGLANG_HOST_IP"]):
        original(*arguments, **keywords)
