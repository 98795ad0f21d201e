"""One server process of ours: started in its own group, logging to a file, ended within a bound, never left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from miles_async.errors import FatalError

_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: *(.*)")
_PORT_TAKEN = re.compile(r"address already in use|port \S+ is (?:already )?(?:in use|not available)", re.IGNORECASE)


class PortTakenError(Exception):
    """Somebody took the port between our look and the server's bind; another one will do."""


class ServerProcess:
    """A `python -m module` server that answers `GET health_url` with 200 once it is up."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], health_url: str, log_path: Path) -> None:
        self.name = name
        self.health_url = health_url
        self.log_path = log_path
        self._command = [sys.executable, "-m", "miles_async.adapters.sglang.die_with_parent", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        """Where this process's part of the log begins: one that it replaces wrote the rest."""

    def start(self, environment: Mapping[str, str], cpus: Sequence[int] | None, timeout: float) -> None:
        """Start and wait until healthy.

        Raises PortTakenError when the port was gone, Fatal with the cause and the log's path when the process died
        or was not healthy after `timeout` seconds; it is stopped then.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": _as_imported(), **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if cpus:
            os.sched_setaffinity(self._process.pid, cpus)
        deadline = time.monotonic() + timeout
        while not self.answers():
            if self._process.poll() is not None:
                self.stop()
                raise self._failure(f"{self.name} ended at start with code {self._process.returncode}")
            if time.monotonic() > deadline:
                self.stop()
                raise self._failure(
                    f"{self.name} was not healthy after {timeout:.0f} s (is engine_start_timeout_seconds too short?)"
                )
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, grace: float = 3.0) -> None:
        """End the whole process group: politely, and after `grace` seconds by force; at once where it is 0."""
        if self._process is None:
            return
        if grace:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def answers(self) -> bool:
        """Whether it says within two seconds that it is up."""
        try:
            with urllib.request.urlopen(self.health_url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _failure(self, what: str) -> Exception:
        log = self.log_path.read_bytes()[self._log_start :].decode(errors="replace")
        if _PORT_TAKEN.search(log):
            return PortTakenError(what)
        return FatalError(f"{what}: {cause(log)} (log: {self.log_path})")


def _as_imported() -> str:
    """The search path, first this very project: a job's copy of it need not be the one that is installed."""
    project = str(Path(__file__).parents[3])
    return os.pathsep.join([project, *filter(None, [os.environ.get("PYTHONPATH")])])


def cause(log: str) -> str:
    """The line of a server's log that says why it ended: its last exception, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or lines or ["it wrote nothing"])[-1][:400]
