"""Heartbeats: the driver probes every process of the run once a second.

A probe is a call to the process itself, or to the actor that owns a server and checks the server. A process that is
stopped, swapped out, dead or behind a broken network does not answer. A process that is merely busy does, because
probes are answered in a separate thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_async.events import ProcessSilent

PROBE_SECONDS = 1.0
"""Interval between probes of a process, and between events about a silent process."""
SILENT_AFTER_SECONDS = 2.0
"""Shorter silences are not reported."""

Probe = Callable[[], Awaitable[Any]]
"""Returns the `host:port` of the metrics of a process, None if it has none, or False if its server does not answer."""


@dataclass(slots=True)
class _Heartbeat:
    """The state of one process; times are in seconds since the epoch."""

    answered: float
    """Time of the last answer."""
    probed: float = 0.0
    """Time of the last probe."""
    reported: float = -1.0
    """Time of the last report of a silence; 0 if the last report was an answer, negative if there was no report."""
    pending: asyncio.Future[Any] | None = None


class Heartbeats:
    """Probes processes and reports those that do not answer."""

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        """`probes` maps process names to probes. It may change later, as processes are started and removed."""
        self._probes = probes
        self._beats: dict[str, _Heartbeat] = {}
        self.addresses: dict[str, str] = {}
        """`host:port` of the metrics of each process that has answered."""

    def look(self, now: float) -> list[ProcessSilent]:
        """Collect answers and send new probes. Call it a few times per second.

        Returns one event per second for each silent process, and one with `seconds` 0 when a silence has ended.
        """
        for process in self._probes.keys() - self._beats.keys():
            self._beats[process] = _Heartbeat(answered=now)
        gone = [self._forget(process, now) for process in self._beats.keys() - self._probes.keys()]
        return gone + [silent for process in self._probes for silent in self._check(process, self._beats[process], now)]

    def silence(self, process: str, now: float) -> float:
        """Return for how many seconds the process has not answered; 0 below `SILENT_AFTER_SECONDS`."""
        silence = now - self._beats[process].answered if process in self._beats else 0.0
        return silence if silence >= SILENT_AFTER_SECONDS else 0.0

    def close(self) -> None:
        for beat in self._beats.values():
            if beat.pending is not None:
                beat.pending.cancel()

    def _forget(self, process: str, now: float) -> ProcessSilent:
        """Stop watching a process that was removed from the run; the event ends any reported silence."""
        beat = self._beats.pop(process)
        if beat.pending is not None:
            beat.pending.cancel()
        self.addresses.pop(process, None)
        return ProcessSilent(time=now, process=process, seconds=0.0)

    def _check(self, process: str, beat: _Heartbeat, now: float) -> list[ProcessSilent]:
        if beat.pending is not None and beat.pending.done():
            self._take_answer(process, beat, now)
        if beat.pending is None and now - beat.probed >= PROBE_SECONDS:
            beat.probed = now
            beat.pending = asyncio.ensure_future(self._probe(process))
        silence = now - beat.answered
        if silence < SILENT_AFTER_SECONDS:
            # Also reported once for a process that was never silent, so that every process of the run is known.
            is_new, beat.reported = beat.reported != 0, 0.0
            return [ProcessSilent(time=now, process=process, seconds=0.0)] if is_new else []
        if now - beat.reported < PROBE_SECONDS:
            return []
        beat.reported = now
        return [ProcessSilent(time=now, process=process, seconds=silence)]

    async def _probe(self, process: str) -> Any:
        return await self._probes[process]()

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
