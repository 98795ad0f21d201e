"""The process that owns one SGLang server."""

from __future__ import annotations

from miles_async.adapters.sglang.launch import EngineServer

from .heartbeats import Heartbeat, heartbeat


class Engine(EngineServer):
    """A Ray actor that owns one SGLang server. The server ends when the actor ends, for whatever reason."""

    def heartbeat(self) -> Heartbeat:
        return heartbeat(self.answers())
