"""The process that owns one SGLang server."""

from __future__ import annotations

from typing import Literal

from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec, Rendezvous


class Engine:
    """A Ray actor around one SGLang server. The server ends with the actor, however the actor ends."""

    def __init__(self, spec: EngineSpec) -> None:
        self._server = EngineServer(spec)

    def rendezvous(self) -> Rendezvous:
        """Where the servers of an engine that spans nodes meet: on the first one's."""
        return self._server.rendezvous()

    def start(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """Start the server and wait until it is healthy. Raises UserError or Fatal with one sentence."""
        return self._server.start(rendezvous)

    def restart(self, rendezvous: Rendezvous | None = None) -> EngineInfo:
        """End what is left of the server and start it anew. Raises as `start` does."""
        return self._server.restart(rendezvous)

    def answers(self) -> str | Literal[False] | None:
        """Where the server serves its metrics, None where another node does; False where it does not answer."""
        return self._server.answers()

    def info(self) -> EngineInfo:
        """Where the server is now; after `start`."""
        return self._server.info

    def alive(self) -> bool:
        return self._server.alive()

    def stop(self) -> None:
        self._server.stop()
