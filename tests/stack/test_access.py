"""A real engine and router answer only clients with the key, and no web page."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from miles_async.adapters.sglang.server_key import authorization
from tests.stack.engine_stack import Stack
from tests.waiting import PATIENCE_SECONDS

pytest_plugins = ["tests.stack.engine_fixtures"]

OPEN_AT_THE_ENGINE = ("/health", "/ready", "/metrics")
"""Beginnings of the paths that SGLang answers without a key, for health checks and Prometheus."""
WEIGHTS = (
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
    "/weights_checker",
)
OF_THE_ROUTER = ("/generate", "/v1/chat/completions", "/workers", "/flush_cache")
ORIGIN = {"Origin": "http://evil.example"}


def ask(url: str, method: str = "POST", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request with an empty JSON object."""
    body = b"{}" if method in ("POST", "PUT") else None
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_an_engine_refuses_requests_about_weights_without_the_key(serving: Stack) -> None:
    assert {path: ask(serving.engine.url + path)[0] for path in WEIGHTS} == dict.fromkeys(WEIGHTS, 401)


def test_an_engine_refuses_every_other_request_without_the_key_too(serving: Stack) -> None:
    _, _, schema = ask(f"{serving.engine.url}/openapi.json", "GET", **authorization(serving.engine.key))
    paths = {path: methods for path, methods in json.loads(schema)["paths"].items() if "{" not in path}
    answers = {
        f"{method.upper()} {path}": ask(serving.engine.url + path, method.upper())[0]
        for path, methods in paths.items()
        if not path.startswith(OPEN_AT_THE_ENGINE)
        for method in methods
    }
    assert {request: status for request, status in answers.items() if status != 401} == {}
    assert len(answers) > 50


def test_a_router_refuses_requests_without_the_key(serving: Stack) -> None:
    assert {path: ask(serving.router_url + path)[0] for path in OF_THE_ROUTER} == dict.fromkeys(OF_THE_ROUTER, 401)


@pytest.mark.parametrize("method", ["OPTIONS", "GET", "POST"])
def test_no_web_page_may_read_an_answer(serving: Stack, method: str) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for url, key in ((serving.engine.url, serving.engine.key), (serving.router_url, serving.router_key)):
        for path in ("/health", "/model_info", "/generate", "/flush_cache"):
            _, headers, _ = ask(url + path, method, **ORIGIN, **preflight, **authorization(key))
            assert "access-control-allow-origin" not in {name.lower() for name in headers}, (url, path)


def test_an_engine_answers_no_web_sockets(serving: Stack) -> None:
    address = urlsplit(serving.engine.url)
    upgrade = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: " + "A" * 22 + "==",
    )
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS) as connection:
        lines = ("GET /v1/realtime HTTP/1.1", f"Host: {address.netloc}", *upgrade, "", "")
        connection.sendall("\r\n".join(lines).encode())
        assert connection.makefile().readline().split()[1] in ("401", "403")


def test_the_addresses_that_weights_are_written_to_cannot_be_replaced(serving: Stack) -> None:
    words = psutil.Process(serving.engine.pid).cmdline()
    port = words[words.index("--engine-info-bootstrap-port") + 1]
    url = f"http://127.0.0.1:{port}/register_transfer_engine_info"
    body = {"tp_rank": 0, "transfer_engine_info": {"session_id": "evil:1", "weights_info_dict": {}}}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"}, method="PUT")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)


def test_the_keys_are_in_no_command_line_environment_log_or_answer(serving: Stack) -> None:
    keys = (serving.engine.key.encode(), serving.router_key.encode())
    _, _, settings = ask(f"{serving.engine.url}/server_info", "GET", **authorization(serving.engine.key))
    shown: dict[str, bytes] = {"server_info": settings}
    for process in psutil.Process().children(recursive=True):
        folder = Path(f"/proc/{process.pid}")
        shown |= {f"{process.pid} {name}": (folder / name).read_bytes() for name in ("cmdline", "environ")}
    shown |= {str(path): path.read_bytes() for path in serving.logs.glob("*.log")}
    assert len(shown) > 5
    assert [name for name, text in shown.items() if any(key in text for key in keys)] == []
