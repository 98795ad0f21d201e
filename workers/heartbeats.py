"""Heartbeats: the driver probes every process of the run once a second.

A probe is a call to the process itself, or to the actor that owns a server and checks the server. A process that is
stopped, swapped out, dead or behind a broken network does not answer. A process that is merely busy does, because
probes are answered in a separate thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_async.events import ProcessSilent

PROBE_SECONDS = 1.0
"""Interval between probes of a process, and between events about a silent process."""
SILENT_AFTER_SECONDS = 2.0
"""Shorter silences are not reported."""
STOPPED_AFTER_SECONDS = 10.0
"""A longer time between two looks means that this process itself was stopped."""

Probe = Callable[[], Awaitable[Any]]
"""Returns the `host:port` of the metrics of a process, None if it has none, or False if its server does not answer."""


@dataclass(slots=True)
class _Heartbeat:
    """The state of one process; times are in seconds of the monotonic clock."""

    probe: Probe
    answered: float
    """Time of the last answer."""
    probed: float | None = None
    """Time of the last probe; None before the first."""
    is_known: bool = False
    """Whether the process has been reported, as silent or not."""
    silent_at: float | None = None
    """Time of the last report of the current silence; None while the process is not reported as silent."""
    pending: asyncio.Future[Any] | None = None


class Heartbeats:
    """Probes processes and reports those that do not answer."""

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        """`probes` maps process names to probes. It may change later, as processes are started and removed."""
        self._probes = probes
        self._beats: dict[str, _Heartbeat] = {}
        self._looked: float | None = None
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
            for beat in self._beats.values():
                beat.answered += gap
        # A process that was replaced has another probe.
        gone = [
            self._forget(process)
            for process, beat in list(self._beats.items())
            if self._probes.get(process) is not beat.probe
        ]
        for process in self._probes.keys() - self._beats.keys():
            self._beats[process] = _Heartbeat(self._probes[process], answered=now)
        return gone + [silent for process in self._probes for silent in self._check(process, self._beats[process], now)]

    def silence(self, process: str, now: float) -> float:
        """Return for how many seconds the process has not answered; 0 below `SILENT_AFTER_SECONDS`."""
        silence = now - self._beats[process].answered if process in self._beats else 0.0
        return silence if silence >= SILENT_AFTER_SECONDS else 0.0

    def close(self) -> None:
        for beat in self._beats.values():
            if beat.pending is not None:
                beat.pending.cancel()

    def _forget(self, process: str) -> ProcessSilent:
        """Stop watching a process that was removed from the run; the event ends any reported silence."""
        beat = self._beats.pop(process)
        if beat.pending is not None:
            beat.pending.cancel()
        self.addresses.pop(process, None)
        return _report(process, 0.0)

    def _check(self, process: str, beat: _Heartbeat, now: float) -> list[ProcessSilent]:
        if beat.pending is not None and beat.pending.done():
            self._take_answer(process, beat, now)
        if beat.pending is None and (beat.probed is None or now - beat.probed >= PROBE_SECONDS):
            beat.probed = now
            beat.pending = asyncio.ensure_future(self._probe(process))
        silence = now - beat.answered
        if silence < SILENT_AFTER_SECONDS:
            # Also reported once for a process that was never silent, so that every process of the run is known.
            is_news = beat.silent_at is not None or not beat.is_known
            beat.is_known, beat.silent_at = True, None
            return [_report(process, 0.0)] if is_news else []
        if beat.silent_at is not None and now - beat.silent_at < PROBE_SECONDS:
            return []
        beat.is_known, beat.silent_at = True, now
        return [_report(process, silence)]

    async def _probe(self, process: str) -> Any:
        return await self._beats[process].probe()

    def _take_answer(self, process: str, beat: _Heartbeat, now: float) -> None:
        assert beat.pending is not None
        failed = beat.pending.cancelled() or beat.pending.exception() is not None
        answer = False if failed else beat.pending.result()
        beat.pending = None
        if answer is False:
            self.addresses.pop(process, None)
            return
        beat.answered = now
        if isinstance(answer, str):
            self.addresses[process] = answer


def _report(process: str, seconds: float) -> ProcessSilent:
    return ProcessSilent(time=time.time(), process=process, seconds=seconds)
