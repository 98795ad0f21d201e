"""Serves `/metrics` and the live page on the loopback interface, with one thread per request."""

from __future__ import annotations

import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from miles_async.errors import UserError
from miles_async.local_requests import foreign_request
from miles_async.observability.page.document import LivePage

CLIENT_TIMEOUT_SECONDS = 2.0
"""How long to wait for the next bytes of a client that sends no request or does not read its response."""
CONNECTION_SECONDS = 30.0
"""Time limit for a request and its response."""
MAX_CONNECTIONS = 128
"""Connections at the same time, each with a thread. The oldest one makes room for a new one."""
CLOSING_SECONDS = 2.0
"""How long the end of a run waits for responses that are being sent."""

STOP_CHECK_SECONDS = 0.1
"""How often the server checks whether it has been closed."""


class HttpServer(ThreadingHTTPServer):
    """Serves requests from construction until `close`, which waits for the responses that are being sent."""

    daemon_threads = False  # `server_close` joins them
    request_queue_size = 64

    def __init__(self, registry: CollectorRegistry, page: LivePage, port: int) -> None:
        """Listen on `port`, or on a free port if it is 0. Raises UserError if the port is already in use."""
        self.registry = registry
        self.page = page
        self._connections: dict[socket, float] = {}
        """When each connection began (`time.monotonic`), the oldest first."""
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"metrics_port {port} is already in use ({error.strerror}): set --metrics-port to a free port, or "
                "unset it"
            ) from error
        self._thread = Thread(target=self.serve_forever, args=(STOP_CHECK_SECONDS,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self.page_url}metrics"

    @property
    def page_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def close(self) -> None:
        self.shutdown()
        deadline = time.monotonic() + CLOSING_SECONDS
        while self._connections and time.monotonic() < deadline:
            time.sleep(STOP_CHECK_SECONDS)
        for connection in list(self._connections):
            self._end(connection)
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        while len(self._connections) >= MAX_CONNECTIONS:
            self._end(next(iter(list(self._connections))))
        self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End slow connections. `serve_forever` calls this every `STOP_CHECK_SECONDS`."""
        for connection, began in list(self._connections.items()):
            if time.monotonic() - began > CONNECTION_SECONDS:
                self._end(connection)

    def _end(self, connection: socket) -> None:
        """Let the thread of a connection read its end, whatever the client does."""
        self._connections.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors such as a client that closed its connection, instead of printing a traceback."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_SECONDS
    server: HttpServer

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"the address of the request is invalid: {error}")
            return
        if (reason := foreign_request(self.headers.get("host"), self.headers.get("origin"))) is not None:
            self._refuse(HTTPStatus.FORBIDDEN, reason)
        elif address.path == "/metrics":
            encoder, kind = choose_encoder(self.headers.get("accept", ""))
            self._answer(encoder(self.server.registry), kind)
        elif address.path == "/":
            self._answer(self.server.page.html(time.time()), "text/html; charset=utf-8")
        elif address.path == "/state.json":
            whole_run = parse_qs(address.query).get("span") == ["whole"]
            self._answer(self.server.page.state("whole" if whole_run else "recent", time.time()), "application/json")
        elif address.path == "/samples.json":
            self._answer(self.server.page.samples(), "application/json")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "this server has /, /state.json, /samples.json and /metrics")

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._answer(f"{sentence}\n".encode(), "text/plain; charset=utf-8", status)

    def _answer(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests: the page sends one every second."""
