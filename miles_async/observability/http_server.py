"""Serves `/metrics` and the live page on loopback, each request in a thread of its own."""

from __future__ import annotations

import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from miles_async.errors import UserError
from miles_async.observability.page.document import LivePage

PATIENCE_SECONDS = 2.0
"""For a client that connects and says nothing, or does not take its answer; the end of a run waits for it."""
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")


class HttpServer:
    """Answers from construction until `close`, which lets answers under way come to their end."""

    def __init__(self, registry: CollectorRegistry, page: LivePage, port: int) -> None:
        """`port` 0 takes a free one. Raises UserError when the port cannot be had."""

        class Handler(_Handler):
            pass

        Handler.registry, Handler.page = registry, page
        try:
            self._server = _Server(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(
                f"metrics_port {port} cannot be had ({error.strerror}): set --metrics-port to a free port, or to 0"
            ) from error
        self.port: int = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    @property
    def page_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # `server_close` joins them
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nobody's concern."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE_SECONDS
    registry: CollectorRegistry
    page: LivePage

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.path == "/metrics":
            encoder, kind = choose_encoder(self.headers.get("accept", ""))
            self._answer(encoder(self.registry), kind)
        elif urlsplit(f"//{self.headers.get('host', '')}").hostname not in LOCAL_NAMES:
            # A web site elsewhere may point its own name at this machine and have a browser read the samples to it.
            self._refuse(HTTPStatus.FORBIDDEN, "open this page under 127.0.0.1 or localhost")
        elif address.path == "/":
            self._answer(self.page.html(time.time()), "text/html; charset=utf-8")
        elif address.path == "/state.json":
            whole = parse_qs(address.query).get("span") == ["whole"]
            self._answer(self.page.state("whole" if whole else "recent", time.time()), "application/json")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there are /, /state.json and /metrics")

    def _answer(self, content: bytes, kind: str) -> None:
        self._send(HTTPStatus.OK, content, kind)

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, f"{sentence}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
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
        """Requests are not news."""
