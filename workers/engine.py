"""The process that owns one SGLang server."""

from __future__ import annotations

from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec, Rendezvous

from .heartbeats import Heartbeat, heartbeat


class Engine:
    """A Ray actor that owns one SGLang server. The server ends when the actor ends, for whatever reason."""

    def __init__(self, spec: EngineSpec) -> None:
        self._server = EngineServer(spec)

    def rendezvous(self) -> Rendezvous:
        """See `EngineServer.rendezvous`. Only on the first node of an engine that spans nodes."""
        return self._server.rendezvous()

    def start(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """Start the server and wait until it is healthy. Raises UserError or FatalError with one sentence."""
        return self._server.start(rendezvous)

    def restart(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """Stop the server if it still runs, then start it. Raises what `start` raises."""
        return self._server.restart(rendezvous)

    def heartbeat(self) -> Heartbeat:
        return heartbeat(self._server.answers())

    def info(self) -> EngineInfo:
        """Return the address of the server; only after `start`."""
        return self._server.info

    def stop(self) -> None:
        self._server.stop()
