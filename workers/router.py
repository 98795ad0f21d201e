"""The process that owns the sglang-router."""

from __future__ import annotations

from miles_async.adapters.sglang.router import RouterServer

from .heartbeats import Heartbeat, heartbeat


class Router(RouterServer):
    """A Ray actor that owns the sglang-router. The router ends when the actor ends, for whatever reason.

    Engines are added and removed through the router's HTTP API (`SGLangFleet.admit`, `SGLangFleet.fence`).
    """

    def heartbeat(self) -> Heartbeat:
        return heartbeat(self.answers())
