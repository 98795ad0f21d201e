"""Serves `/metrics` on loopback, from a thread."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from miles_async.errors import UserError


class MetricsServer:
    """Answers from construction until `close`."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        """`port` 0 takes a free one. Raises UserError when the port cannot be had."""
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise UserError(
                f"metrics_port {port} cannot be had ({error.strerror}): set --metrics-port to a free port, or to 0"
            ) from error
        self.port: int = self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
