"""The process that owns the sglang-router."""

from __future__ import annotations

from typing import Literal

from miles_async.adapters.sglang.router import RouterServer, RouterSpec


class Router:
    """A Ray actor around the sglang-router. The router ends with the actor, however the actor ends.

    Engines are added and removed over the router's HTTP API (`SGLangFleet.admit`, `SGLangFleet.fence`).
    """

    def __init__(self, spec: RouterSpec) -> None:
        self._server = RouterServer(spec)

    def start(self) -> str:
        """Start the router; returns its url. Raises Fatal with one sentence."""
        return self._server.start()

    def restart(self) -> str:
        """Start the router anew at its old address, without engines. Raises Fatal with one sentence."""
        return self._server.restart()

    def answers(self) -> str | Literal[False]:
        """Where the server serves its metrics; False where it does not answer."""
        return self._server.answers()

    def metrics_url(self) -> str:
        """Where its own metrics are served; after `start`."""
        return self._server.metrics_url

    def pid(self) -> int:
        """Of the router's process; after `start`."""
        return self._server.pid

    def alive(self) -> bool:
        return self._server.alive()

    def stop(self) -> None:
        self._server.stop()
