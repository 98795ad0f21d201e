"""The watchdog of the driver: it probes all processes, kills those that hang, and dumps all stacks if the run stalls.

The watchdog needs no help from the other processes. Stacks are read from outside with py-spy, so a process that is
stopped, or blocked in C code, also shows where it is.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import structlog

from miles_async.config.schema import Observability
from miles_async.errors import FatalError
from miles_async.observability.subscribers import EventSubscribers
from miles_async.scheduling.stall import dumps_stacks

if TYPE_CHECKING:
    from .cluster import Cluster

SILENCE_SECONDS = 120.0
"""A rollout worker that has not answered for so long hangs, and is replaced."""
LOST_SECONDS = 300.0
"""A rollout worker that has not answered for so long could not be replaced."""
STOPPED_SECONDS = 10.0
"""A process that is stopped (SIGSTOP) and has not answered for so long is killed, and another one takes its place."""
PY_SPY_SECONDS = 10.0
"""Time limit for reading the stack of one process."""
PY_SPY = Path(sys.executable).with_name("py-spy")

log = structlog.get_logger(__name__)


class Watchdog:
    """Watches the processes of a cluster. Call `look` about four times a second."""

    def __init__(self, cluster: Cluster, subscribers: EventSubscribers, settings: Observability) -> None:
        self._cluster = cluster
        self._subscribers = subscribers
        self._settings = settings
        self._heartbeats = cluster.heartbeats
        self._dump: asyncio.Task[None] | None = None
        self._dumped_in_stall = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._heartbeats.close()
        if self._dump is not None:
            self._dump.cancel()

    def look(self, now: float) -> None:
        """Probe processes, update subscribers, and dump stacks once per stall.

        `now` is in seconds of the monotonic clock. A rollout worker that hangs is killed, and another one continues.
        The rollout worker ends a stalled run. Raises FatalError if the run stalls and no rollout worker answers.
        """
        self._subscribers.emit(*self._heartbeats.look(now))
        self._subscribers.update_scrape_targets(self._heartbeats.addresses)
        self._subscribers.tick(now)
        stalled = self._subscribers.stall.stalled_for(now)
        if not stalled:
            self._dumped_in_stall = False
        elif not self._dumped_in_stall and dumps_stacks(stalled, *self._limits):
            self._dumped_in_stall = True
            self._dump = asyncio.ensure_future(self._dump_stacks())
        self._heartbeats.kill_stopped(silent=STOPPED_SECONDS, now=now)
        silent = self._heartbeats.silence("rollout", now)
        if silent >= SILENCE_SECONDS:
            self._cluster.rollout.end_hung(silent)
        if silent >= LOST_SECONDS and stalled >= self._settings.no_progress_abort_seconds:
            raise FatalError(
                f"the rollout worker has not answered for {silent:.0f}s, and the run made no progress for "
                f"{stalled:.0f}s (--no-progress-abort-seconds); see its stack and its log in {self._cluster.logs}"
            )

    @property
    def _limits(self) -> tuple[float, float]:
        return self._settings.no_progress_warn_seconds, self._settings.no_progress_abort_seconds

    async def _dump_stacks(self) -> None:
        path = await asyncio.to_thread(dump_stacks, self._cluster.processes, Path(self._cluster.logs))
        log.warning("wrote the Python stacks of all processes", file=str(path))


def dump_stacks(processes: Iterable[psutil.Process], folder: Path) -> Path:
    """Write the Python stacks of all processes to one file in `folder`, and return its path.

    Blocks for up to `PY_SPY_SECONDS` per process.
    """
    path = folder / f"stacks-{time.strftime('%H%M%S')}.txt"
    with path.open("w") as file:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline()) or process.name()
                file.write(f"==== pid {process.pid}, {process.status()}: {command[:200]}\n{_stack(process.pid)}\n")
                file.flush()
    return path


def _stack(pid: int) -> str:
    # Without --nonblocking, py-spy pauses the process, and waits forever for a process that is stopped already.
    command = [str(PY_SPY), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: {error}"
    if result.returncode == 0:
        return result.stdout
    reason = result.stderr.strip() or "py-spy printed no reason"
    if "ermission" in reason:
        reason += "; to allow it, run: sudo sysctl kernel.yama.ptrace_scope=0"
    return f"no stack: {reason}"
