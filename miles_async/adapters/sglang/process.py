"""A server process: started in its own process group, logging to a file, and stopped within a time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

from miles_async.adapters.system.network_ports import ClaimedPort
from miles_async.config.redaction import secret_values
from miles_async.errors import FatalError
from miles_async.observability.redacted_log import RedactedLog

T = TypeVar("T")
PORT_ATTEMPTS = 3
LOG_SECONDS = 2.0
"""Time limit for the last lines of a server that has ended to reach its log."""
END_SECONDS = 2.0
"""A server that has closed its connections and still runs after this time is not about to end."""
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?P<message>: .*)?$")
_MARKERS = re.compile(r"^[~^]+$")
"""Lines of a traceback that mark a part of the line above."""
_PORT_TAKEN = re.compile(r"address already in use|port \S+ is (?:already )?(?:in use|not available)", re.IGNORECASE)


class PortTakenError(Exception):
    """Another process has taken the port before the server could bind it; try again with another port."""


def start_on_free_ports(name: str, log_path: Path, start: Callable[[], T]) -> T:
    """Call `start`, which claims ports, until none of them is taken. Raises FatalError after `PORT_ATTEMPTS` calls."""
    # A claim protects a port from other runs only; any other program may still take it.
    for _ in range(PORT_ATTEMPTS):
        with suppress(PortTakenError):
            return start()
    raise FatalError(f"{name} found no free port in {PORT_ATTEMPTS} attempts (log: {log_path})")


def release(ports: list[ClaimedPort]) -> None:
    """Release the ports and empty the list."""
    while ports:
        ports.pop().release()


class ServerProcess:
    """A server started as `python -m module` that answers `GET health_url` with status 200 when it is healthy.

    The module has to call `receive_key` of `server_key.py` first.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], health_url: str, log_path: Path) -> None:
        self.name = name
        self.health_url = health_url
        self.log_path = log_path
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: RedactedLog | None = None
        self._log_start = 0
        """Offset of this process's output in the log file, which starts with the output of its predecessors."""

    def start(self, environment: Mapping[str, str], cpus: Sequence[int] | None, timeout: float, key: str) -> None:
        """Start the process and wait until it is healthy.

        `environment` is added to this process's environment; `cpus` are the cores it may use; `key` is the API key that
        the server demands. Raises PortTakenError if its port is in use, and FatalError with the cause and the path of
        the log if the process dies or is not healthy after `timeout` seconds; the process is stopped then.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        variables = {**os.environ, "PYTHONPATH": _search_path(), **environment}
        log = self._log = RedactedLog(FileIO(self.log_path, "ab"), {key, *secret_values(variables, self._command)})
        try:
            self._process = subprocess.Popen(
                self._command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=log.descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group, so that `stop` reaches the server's own children
            )
        finally:
            log.close_writer()
        if cpus:
            os.sched_setaffinity(self._process.pid, cpus)
        # The pipe stays open: the server ends when it closes (`server_key.receive_key`).
        assert self._process.stdin is not None, "a pipe"
        with suppress(BrokenPipeError):  # the server has ended already, which is reported below
            self._process.stdin.write(f"{key}\n".encode())
            self._process.stdin.flush()
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

    def end(self) -> str | None:
        """Say how and why the process ended, with the path of its log. Returns None if it still runs."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        if self._log is not None:
            self._log.finish(LOG_SECONDS)
        return f"its server ended with code {code}: {cause(self._written())} (log: {self.log_path})"

    def stop(self, grace: float = 3.0) -> None:
        """Stop the process group: SIGTERM, then SIGKILL after `grace` seconds. With 0, SIGKILL at once."""
        if self._process is None:
            return
        if grace:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._signal(signal.SIGKILL)
        self._process.communicate()  # closes the pipe and reaps the process
        if self._log is not None:
            self._log.finish(LOG_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def answers(self) -> bool:
        """Whether the server answers within two seconds that it is healthy."""
        try:
            with urllib.request.urlopen(self.health_url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _written(self) -> str:
        """Return what this process has written to the log."""
        written = self.log_path.read_bytes()
        # A log that was rotated since the start is shorter than it was at the beginning.
        start = self._log_start if self._log_start <= len(written) else 0
        return written[start:].decode(errors="replace")

    def _failure(self, what: str) -> Exception:
        log = self._written()
        if _PORT_TAKEN.search(log):
            return PortTakenError(what)
        return FatalError(f"{what}: {cause(log)} (log: {self.log_path})")


def _search_path() -> str:
    """Return a PYTHONPATH that starts with this project: `ray job submit` runs a copy that is not installed."""
    project = str(Path(__file__).parents[3])
    return os.pathsep.join([project, *filter(None, [os.environ.get("PYTHONPATH")])])


def cause(log: str) -> str:
    """Return the line of a server's log that best explains its end: the last exception, or else the last line."""
    lines = [line for line in map(str.strip, log.splitlines()) if line and not _MARKERS.match(line)]
    for number in reversed(range(len(lines))):
        if (exception := _EXCEPTION.match(lines[number])) is not None:
            # An exception without a message, such as that of a failed `assert`, is explained by the statement above.
            statement = "" if exception["message"] or not number else f": {lines[number - 1]}"
            return f"{lines[number]}{statement}"[:400]
    return (lines or ["its log is empty"])[-1][:400]
