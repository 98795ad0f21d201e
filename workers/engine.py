"""The process that owns one SGLang server."""

from __future__ import annotations

from typing import Literal

from miles_async.adapters.sglang.launch import EngineInfo, EngineServer, EngineSpec


class Engine:
    """A Ray actor around one SGLang server. The server ends with the actor, however the actor ends."""

    def __init__(self, spec: EngineSpec) -> None:
        self._server = EngineServer(spec)

    def start(self) -> EngineInfo:
        """Start the server and wait until it is healthy. Raises UserError or Fatal with one sentence."""
        return self._server.start()

    def answers(self) -> str | Literal[False]:
        """Where the server serves its metrics; False where it does not answer."""
        return self._server.answers()

    def alive(self) -> bool:
        return self._server.alive()

    def stop(self) -> None:
        self._server.stop()
