"""The sglang-router in front of the engines: its process, and its worker list over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_async.adapters.sglang.process import PortTaken, ServerProcess, free_port
from miles_async.errors import Fatal

PORT_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    log_path: Path
    policy: str = "cache_aware"
    request_timeout: float = 600.0
    """Seconds after which a request is given up."""
    start_timeout: float = 60.0
    cpus: Sequence[int] | None = None


class RouterServer:
    """One sglang-router process on loopback, started without workers."""

    def __init__(self, spec: RouterSpec) -> None:
        self.spec = spec
        self._process: ServerProcess | None = None
        self._metrics_address = ""

    def start(self) -> str:
        """Start it; returns its url. Raises Fatal with the cause when it does not come up."""
        for _ in range(PORT_ATTEMPTS):
            port, metrics_port = free_port(), free_port()
            url = f"http://127.0.0.1:{port}"
            self._metrics_address = f"127.0.0.1:{metrics_port}"
            words = [json.dumps(arguments(self.spec, port, metrics_port))]
            module = "miles_async.adapters.sglang.router_process"
            self._process = ServerProcess("sglang-router", module, words, f"{url}/liveness", self.spec.log_path)
            try:
                self._process.start({"NO_PROXY": "127.0.0.1"}, self.spec.cpus, self.spec.start_timeout)
            except PortTaken:
                continue
            return url
        raise Fatal(f"sglang-router found no free port in {PORT_ATTEMPTS} attempts (log: {self.spec.log_path})")

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def answers(self) -> str | Literal[False]:
        """Where it serves its metrics; False where it does not answer."""
        if self._process is None or not self._process.answers():
            return False
        return self._metrics_address

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


def arguments(spec: RouterSpec, port: int, metrics_port: int) -> dict[str, Any]:
    """Retries and circuit breaking are off: the pipeline retries groups itself and fences engines itself."""
    return {
        "host": "127.0.0.1",
        "port": port,
        "worker_urls": [],
        "policy": spec.policy,
        "log_level": "warn",
        "request_timeout_secs": int(spec.request_timeout) or 1,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "worker_startup_timeout_secs": int(spec.start_timeout),
        "worker_startup_check_interval": 1,
        "health_check_interval_secs": 5,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": metrics_port,
    }
