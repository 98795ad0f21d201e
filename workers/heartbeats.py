"""Heartbeats: the driver probes every process of the run once a second.

A probe is a call to the process itself, or to the actor that owns a server and checks the server. A process that is
stopped, swapped out, dead or behind a broken network does not answer. A process that is merely busy does, because
probes are answered in a separate thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil
import ray

from miles_async.adapters.system.run_processes import kill_if_stopped
from miles_async.events import ProcessSilent

PROBE_SECONDS = 1.0
"""Interval between probes of a process, and between events about a silent process."""
SILENT_AFTER_SECONDS = 2.0
"""Shorter silences are not reported."""
STOPPED_AFTER_SECONDS = 10.0
"""A longer time between two looks means that this process itself was stopped."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The answer of a process to a probe."""

    node: str
    """The id of its node in Ray."""
    pid: int
    """Its process id there."""
    metrics: str | Literal[False] | None
    """The `host:port` of its metrics, None if it has none, or False if what the process serves does not answer."""


def heartbeat(metrics: str | Literal[False] | None = None) -> Heartbeat:
    """Return the heartbeat of this process."""
    return Heartbeat(ray.get_runtime_context().get_node_id(), os.getpid(), metrics)


Probe = Callable[[], Awaitable[Heartbeat]]
"""Calls a process."""


@dataclass(slots=True)
class _Process:
    """What is known of one process; times are in seconds of the monotonic clock."""

    probe: Probe
    answered: float
    """Time of the last answer."""
    probed: float | None = None
    """Time of the last probe; None before the first."""
    is_known: bool = False
    """Whether the process has been reported, as silent or not."""
    silent_at: float | None = None
    """Time of the last report of the current silence; None while the process is not reported as silent."""
    pending: asyncio.Future[Heartbeat] | None = None


class Heartbeats:
    """Probes processes and reports those that do not answer."""

    def __init__(self, probes: Mapping[str, Probe], node: str) -> None:
        """`probes` maps process names to probes. It may change later, as processes are started and removed.

        `node` is the id of the node of this process in Ray.
        """
        self._probes = probes
        self._node = node
        self._known: dict[str, _Process] = {}
        self._looked: float | None = None
        self._local: dict[Probe, psutil.Process] = {}
        """The process on this node that has answered a probe last."""
        self._on_this_node: set[psutil.Process] = set()
        """Also processes that are not watched any more: Ray may not have ended them yet."""
        self.addresses: dict[str, str] = {}
        """`host:port` of the metrics of each process that has answered."""

    def look(self, now: float) -> list[ProcessSilent]:
        """Collect answers and send new probes. Call it a few times per second, with the time of the monotonic clock.

        Returns one event per second for each silent process, and one with `seconds` 0 when a silence has ended.
        """
        gap = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if gap >= STOPPED_AFTER_SECONDS:
            # Answers may have arrived that this process could not read.
            for known in self._known.values():
                known.answered += gap
        # A process that was replaced has another probe.
        gone = [
            self._forget(process)
            for process, known in list(self._known.items())
            if self._probes.get(process) is not known.probe
        ]
        for process in self._probes.keys() - self._known.keys():
            self._known[process] = _Process(self._probes[process], answered=now)
        return gone + [silent for process in self._probes for silent in self._check(process, self._known[process], now)]

    async def wait_for_answer(self, process: str) -> None:
        """Wait until a process answers. From then on, it can be killed if it is stopped (SIGSTOP).

        Raises RayActorError if it is lost.
        """
        probe = self._probes[process]
        self._locate(probe, await probe())

    def silence(self, process: str, now: float) -> float:
        """Return for how many seconds the process has not answered; 0 below `SILENT_AFTER_SECONDS`."""
        silence = now - self._known[process].answered if process in self._known else 0.0
        return silence if silence >= SILENT_AFTER_SECONDS else 0.0

    def kill_stopped(self, *, silent: float, now: float) -> None:
        """Kill each process that is stopped (SIGSTOP) and has not answered for `silent` seconds.

        Ray cannot end such a process. Processes of other nodes are left alone.
        """
        for process, known in self._known.items():
            if known.probe in self._local and self.silence(process, now) >= silent:
                kill_if_stopped(self._local[known.probe])

    def local_processes(self) -> list[psutil.Process]:
        """Return all processes on this node that have ever answered; some may have ended."""
        return list(self._on_this_node)

    def close(self) -> None:
        for known in self._known.values():
            if known.pending is not None:
                known.pending.cancel()

    def _forget(self, process: str) -> ProcessSilent:
        """Stop watching a process that was removed from the run; the event ends any reported silence."""
        known = self._known.pop(process)
        if known.pending is not None:
            known.pending.cancel()
        self.addresses.pop(process, None)
        self._local.pop(known.probe, None)
        return _report(process, 0.0)

    def _check(self, process: str, known: _Process, now: float) -> list[ProcessSilent]:
        if known.pending is not None and known.pending.done():
            self._take_answer(process, known, now)
        if known.pending is None and (known.probed is None or now - known.probed >= PROBE_SECONDS):
            known.probed = now
            known.pending = asyncio.ensure_future(self._probe(process))
        silence = now - known.answered
        if silence < SILENT_AFTER_SECONDS:
            # Also reported once for a process that was never silent, so that every process of the run is known.
            is_news = known.silent_at is not None or not known.is_known
            known.is_known, known.silent_at = True, None
            return [_report(process, 0.0)] if is_news else []
        if known.silent_at is not None and now - known.silent_at < PROBE_SECONDS:
            return []
        known.is_known, known.silent_at = True, now
        return [_report(process, silence)]

    async def _probe(self, process: str) -> Heartbeat:
        return await self._known[process].probe()

    def _take_answer(self, process: str, known: _Process, now: float) -> None:
        assert known.pending is not None
        failed = known.pending.cancelled() or known.pending.exception() is not None
        answer = None if failed else known.pending.result()
        known.pending = None
        if answer is not None:
            self._locate(known.probe, answer)
        if answer is None or answer.metrics is False:
            self.addresses.pop(process, None)
            return
        known.answered = now
        if answer.metrics is not None:
            self.addresses[process] = answer.metrics

    def _locate(self, probe: Probe, answer: Heartbeat) -> None:
        known = self._local.get(probe)
        if answer.node == self._node and (known is None or known.pid != answer.pid):
            with suppress(psutil.NoSuchProcess):
                self._local[probe] = psutil.Process(answer.pid)
                self._on_this_node.add(self._local[probe])


def _report(process: str, seconds: float) -> ProcessSilent:
    return ProcessSilent(time=time.time(), process=process, seconds=seconds)
