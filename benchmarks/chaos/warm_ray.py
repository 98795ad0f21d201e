"""A Ray that stays up while one run after the other joins it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from miles_async.adapters.system.network_ports import free_port
from miles_async.adapters.system.run_processes import run_process
from tests.stack.job import MARK, marked
from workers.specs import ACTORS_AT_MOST

OF_RAY = (
    "ray/core/src/ray/",
    "ray/dashboard/",
    "ray/autoscaler/",
    "ray/_private/",
    "ray::IDLE",
    "ray::DashboardAgent",
    "ray::RuntimeEnv",
)
"""Parts of the command lines of processes that belong to Ray and not to a run."""


class WarmRay:
    """Starts Ray, and starts it again if a run has lost one of its daemons."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        """The mark in the environment of its processes and of the processes of the runs that join it."""
        self.address = ""

    def __enter__(self) -> Self:
        return self

    def ensure(self) -> None:
        """Start Ray unless its daemons run. Processes of earlier runs are killed then."""
        states = {run_process(process): process.status() for process in self._processes()}
        if "gcs" in states and "raylet" in states and psutil.STATUS_STOPPED not in states.values():
            return
        self._kill()
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--node-ip-address=127.0.0.1"]
        options = [f"--port={port}", f"--num-cpus={ACTORS_AT_MOST}", "--include-dashboard=false"]
        settings = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        environment = {**os.environ, **settings, MARK: self.mark}
        subprocess.run([*ray, *options], env=environment, check=True, capture_output=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill()

    def of_runs(self) -> dict[int, str]:
        """Pid and command line of each process that a run has left."""
        return {pid: line for pid, line in marked(self.mark) if not any(part in line for part in OF_RAY)}

    def _processes(self) -> list[psutil.Process]:
        found = []
        for pid, _ in marked(self.mark):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def _kill(self) -> None:
        for pid, _ in marked(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
