"""Asks every process of the run, again and again, whether it is there.

The question goes to the process itself, or to the actor that owns a server and knows whether that answers. A process
that is stopped, swapped out, dead or on the far side of a broken network leaves it unanswered, whatever it is that it
was doing; one that is only busy answers from another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_async.events import ProcessSilent

ASK_SECONDS = 1.0
SILENT_FROM_SECONDS = 2.0
"""Shorter silences are not told."""

Probe = Callable[[], Awaitable[Any]]
"""Its answer is the address where the process serves metrics, None where it serves none and False for no."""


@dataclass(slots=True)
class _Heartbeat:
    heard: float
    asked: float = 0.0
    told: float = -1.0
    """When its silence was last told of; 0 while it answers, and below 0 before anything was told of it."""
    pending: asyncio.Future[Any] | None = None


class Heartbeats:
    def __init__(self, probes: Mapping[str, Probe]) -> None:
        """Probes may come and go as processes do."""
        self._probes = probes
        self._beats: dict[str, _Heartbeat] = {}
        self.addresses: dict[str, str] = {}
        """Where processes serve metrics, as far as they answered."""

    def look(self, now: float) -> list[ProcessSilent]:
        """Take the answers that came, ask anew, and tell of silences once a second, and of each that ended."""
        for process in self._probes.keys() - self._beats.keys():
            self._beats[process] = _Heartbeat(heard=now)
        gone = [self._forget(process, now) for process in self._beats.keys() - self._probes.keys()]
        return gone + [
            silent for process in self._probes for silent in self._look_at(process, self._beats[process], now)
        ]

    def silence(self, process: str, now: float) -> float:
        """Seconds for which the process has not answered; 0 where that is too short to mean anything."""
        silence = now - self._beats[process].heard if process in self._beats else 0.0
        return silence if silence >= SILENT_FROM_SECONDS else 0.0

    def close(self) -> None:
        for beat in self._beats.values():
            if beat.pending is not None:
                beat.pending.cancel()

    def _forget(self, process: str, now: float) -> ProcessSilent:
        """A process that was ended on purpose is not silent."""
        beat = self._beats.pop(process)
        if beat.pending is not None:
            beat.pending.cancel()
        self.addresses.pop(process, None)
        return ProcessSilent(time=now, process=process, seconds=0.0)

    def _look_at(self, process: str, beat: _Heartbeat, now: float) -> list[ProcessSilent]:
        if beat.pending is not None and beat.pending.done():
            self._answered(process, beat, now)
        if beat.pending is None and now - beat.asked >= ASK_SECONDS:
            beat.asked = now
            beat.pending = asyncio.ensure_future(self._ask(process))
        silence = now - beat.heard
        if silence < SILENT_FROM_SECONDS:
            news, beat.told = beat.told != 0, 0.0
            return [ProcessSilent(time=now, process=process, seconds=0.0)] if news else []
        if now - beat.told < ASK_SECONDS:
            return []
        beat.told = now
        return [ProcessSilent(time=now, process=process, seconds=silence)]

    async def _ask(self, process: str) -> Any:
        return await self._probes[process]()

    def _answered(self, process: str, beat: _Heartbeat, now: float) -> None:
        assert beat.pending is not None
        failed = beat.pending.cancelled() or beat.pending.exception() is not None
        answer = False if failed else beat.pending.result()
        beat.pending = None
        if answer is False:
            self.addresses.pop(process, None)
            return
        beat.heard = now
        if isinstance(answer, str):
            self.addresses[process] = answer
