"""The process that owns the sglang-router."""

from __future__ import annotations

from miles_async.adapters.sglang.router import RouterServer, RouterSpec

from .heartbeats import Heartbeat, heartbeat


class Router:
    """A Ray actor that owns the sglang-router. The router ends when the actor ends, for whatever reason.

    Engines are added and removed through the router's HTTP API (`SGLangFleet.admit`, `SGLangFleet.fence`).
    """

    def __init__(self, spec: RouterSpec) -> None:
        self._server = RouterServer(spec)

    def start(self) -> str:
        """Start the router and return its URL. Raises FatalError with one sentence."""
        return self._server.start()

    def restart(self, url: str) -> str:
        """Start the router at `url`, its previous address, without engines. Raises FatalError with one sentence."""
        return self._server.restart(url)

    def heartbeat(self) -> Heartbeat:
        return heartbeat(self._server.answers())

    def metrics_url(self) -> str:
        """Return the URL of the router's metrics; only after `start`."""
        return self._server.metrics_url

    def pid(self) -> int:
        """Return the process id of the router; only after `start`."""
        return self._server.pid

    def stop(self) -> None:
        self._server.stop()
