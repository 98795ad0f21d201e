"""Starts and stops the sglang-router that distributes requests among the engines."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from miles_async.adapters.sglang.process import PortTakenError, ServerProcess, release, start_on_free_ports
from miles_async.adapters.sglang.server_key import authorization, new_key
from miles_async.adapters.system.network_ports import ClaimedPort, claim_port
from miles_async.errors import FatalError, UserError

START_SECONDS = 60.0
"""Time limit for the router to become healthy, and for an engine that is added to it."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    log_path: Path
    policy: str = "cache_aware"
    port: int | None = None
    """Port on loopback; None for any free port."""
    request_timeout: float = 600.0
    """Seconds after which the router gives up a request."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `RouterArgs`, which override those that the run does not need."""
    key: str = field(default_factory=new_key, repr=False)
    """API key that every request to the router has to carry."""


class RouterServer:
    """One sglang-router process on loopback. It starts without engines; `SGLangFleet` adds them."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self._process: ServerProcess | None = None
        self._ports: list[ClaimedPort] = []

    def start(self) -> str:
        """Start the router and return its URL. Raises FatalError with the cause if it does not start."""
        if self.spec.port is None:
            return start_on_free_ports("sglang-router", self.spec.log_path, self._start)
        try:
            return self._start()
        except (PortTakenError, OSError) as taken:
            raise FatalError(
                f"sglang_router_port {self.spec.port} is not available ({taken}): set it to a free port, or unset it"
            ) from taken

    def restart(self, url: str) -> str:
        """Start the router at `url`, its previous address, which all other processes keep using.

        The router may have been started by another process that has died since, so this object may not have claimed the
        ports yet. Raises FatalError as `start`, or if the port is in use: try again, the old router may be ending.
        """
        if self._process is not None:
            self._process.stop(grace=0)
        try:
            if not self._ports:
                self._ports = [ClaimedPort(urlsplit(url).port or 80), claim_port()]
            return self._serve()
        except (PortTakenError, OSError) as taken:
            raise FatalError(f"sglang-router cannot listen on its previous port again: {taken}") from taken

    def _start(self) -> str:
        release(self._ports)
        self._ports = [claim_port() if self.spec.port is None else ClaimedPort(self.spec.port), claim_port()]
        return self._serve()

    def _serve(self) -> str:
        port, metrics_port = (claimed.number for claimed in self._ports)
        words = [json.dumps(arguments(self.spec, port, metrics_port))]
        module = "miles_async.adapters.sglang.router_process"
        self._process = ServerProcess("sglang-router", module, words, f"{self.url}/liveness", self.spec.log_path)
        self._process.start({"NO_PROXY": "127.0.0.1"}, None, START_SECONDS, self.spec.key)
        return self.url

    @property
    def url(self) -> str:
        """URL of the router; only after `start`."""
        return f"http://127.0.0.1:{self._ports[0].number}"

    def metrics_url(self) -> str:
        """Return the URL of the router's Prometheus metrics; only after `start`."""
        return f"http://127.0.0.1:{self._ports[1].number}/metrics"

    def pid(self) -> int:
        """Return the process id of the router; only after `start`."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def answers(self) -> str | Literal[False]:
        """Return the host and port of the router's metrics, or False if the router does not answer."""
        if self._process is None or not self._process.answers():
            return False
        return urlsplit(self.metrics_url()).netloc

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        release(self._ports)


def require_router(url: str, key: str = "", within: float = 10.0) -> None:
    """Raise UserError if no sglang-router answers at `url` within `within` seconds, or it refuses the key."""
    request = urllib.request.Request(f"{url}/workers", headers=authorization(key))
    try:
        with urllib.request.urlopen(request, timeout=within) as answer:
            json.load(answer)["workers"]
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.UNAUTHORIZED:
            raise UserError(
                f"the sglang-router at {url} answers {error.code} to /workers: set sglang_router_ip and "
                "sglang_router_port to the address of an sglang-router"
            ) from error
        raise UserError(
            f"the sglang-router at {url} refuses the key of this run: set sglang_router_api_key to the api_key that it "
            "was started with"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"no sglang-router answers at sglang_router_ip and sglang_router_port: {url}/workers: {error}; start one "
            "there, or unset both"
        ) from error


def arguments(spec: RouterSpec, port: int, metrics_port: int) -> dict[str, Any]:
    """Return the arguments of `RouterArgs`, without the key.

    Retries and circuit breaking are off, because the pipeline itself retries groups and fences engines.
    """
    return {
        "host": "127.0.0.1",
        "port": port,
        "worker_urls": [],
        "policy": spec.policy,
        "log_level": "warn",
        "request_timeout_secs": int(spec.request_timeout) or 1,
        # An empty list would allow web pages of any origin to read the router's answers; no page has this origin.
        "cors_allowed_origins": ["http://none.invalid"],
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "worker_startup_timeout_secs": int(START_SECONDS),
        "worker_startup_check_interval": 1,
        "health_check_interval_secs": 5,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": metrics_port,
        **spec.further,
    }
