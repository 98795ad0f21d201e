"""Simulated engines on virtual time: permits, queues, weight versions, pauses, stalls and faults."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from miles_async.errors import EngineLostError, TrajectoryError
from miles_async.identity import IdentityMap
from miles_async.scheduling.lineage import Lineage
from miles_async.time_limit import waiting_in_line
from miles_async.types import EngineLoad, Group, SampleStatus, SendOutcome, VersionSpan
from tests.sim.virtual_time import VirtualClock

Latency = Callable[[Group, random.Random], float]
"""Seconds that one request takes once it has a permit."""
TOKENS_PER_SECOND = 50.0
"""Of each request."""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """Properties of the engines. Rates are fractions of the groups; times are in seconds."""

    requests_per_group: int = 1
    """Each sample takes one permit. A group is complete when its last sample is."""
    concurrency: int | None = None
    """Requests served at once; the others wait in line. None serves all at once."""
    failure_rate: float = 0.0
    lost_rate: float = 0.0
    stage_seconds: float = 0.01
    write_seconds: float = 0.02
    """Nothing is decoded while weights are written."""
    stall_every: float | None = None
    stall_seconds: float = 0.0
    """From time to time nothing is decoded for so long."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """One group at the engines."""

    done: asyncio.Future[SampleStatus]
    admitted: asyncio.Future[None]
    """Done when its first request gets a permit."""
    unfinished: int
    born: int | None = None
    """Version of its first token."""
    ends: dict[int, float] = field(default_factory=dict)
    """When its running requests end, on the work clock, by serial number."""
    waiting: list[float] = field(default_factory=list)
    """Seconds of its requests that have no permit yet."""


class Engines:
    """Generator, Fleet and WeightChannel in one. Requests use a clock that stops while the engines are paused.

    A publish in the middle of a group splits its span. An aborted group that comes back with its tokens goes on where
    it stopped; one that was reset starts afresh.
    """

    def __init__(self, clock: VirtualClock, latency: Latency, model: EngineModel, seed: int) -> None:
        self._clock = clock
        self._latency = latency
        self._model = model
        self._permits = model.concurrency or 1 << 60
        self._rng = random.Random(seed)
        self._tickets = IdentityMap[Group, _Ticket]()
        self._left: dict[str, list[float]] = {}
        """The remaining work of aborted groups, by feed index."""
        self._running: list[tuple[float, int, _Ticket]] = []
        self._line: deque[_Ticket] = deque()
        self._taken = 0
        self._drawn = 0.0
        """Tokens until `_drawn_at`, on the work clock."""
        self._drawn_at = 0.0
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self._paused_at = 0.0
        self._paused_seconds = 0.0
        self._stalls = False
        self.version = -1
        self.in_flight = 0
        self.busy_seconds = 0.0
        self._busy_since = 0.0
        self.worked_seconds = 0.0
        """Place-seconds of all that was generated."""

    # Generator
    @property
    def requests(self) -> Engines:
        return self

    @property
    def in_line(self) -> int:
        return self.in_flight - self._taken

    async def generate(self, group: Group) -> None:
        if self._model.stall_every is not None and not self._stalls:
            self._stalls = True
            asyncio.get_running_loop().call_later(self._model.stall_every, self._stall)
        unfinished = [sample for sample in group if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        if not unfinished:
            return
        before = unfinished[0].spans
        lengths = self._left.pop(group.feed_index, []) if before else []
        fault = self._rng.random()
        if not lengths:
            lengths = [self._latency(group, self._rng) for _ in range(self._model.requests_per_group)]
        status, born = await self._serve(group, lengths)
        if status is SampleStatus.COMPLETED and fault < self._model.failure_rate + self._model.lost_rate:
            raise TrajectoryError("injected") if fault < self._model.failure_rate else EngineLostError("injected")
        versions = () if born is None else self._sampled_by(born)
        start = before[-1].end if before else 0
        spans = [*before, *(VersionSpan(version, start + i, start + i + 1) for i, version in enumerate(versions))]
        for sample in unfinished:
            prompt = sample.tokens[: sample.prompt_length] or [0]
            sample.spans, sample.response_length, sample.status = spans, len(spans), status
            sample.tokens, sample.rollout_log_probs = [*prompt, *[0] * len(spans)], [0.0] * len(spans)

    def _sampled_by(self, born: int) -> Sequence[int]:
        """The versions that have sampled an answer whose first token is of `born`."""
        return range(born, self.version + 1)

    async def _serve(self, group: Group, lengths: list[float]) -> tuple[SampleStatus, int | None]:
        """How it ended, and the version of its first token."""
        loop = asyncio.get_running_loop()
        ticket = _Ticket(loop.create_future(), loop.create_future(), len(lengths), waiting=lengths)
        self._tickets[group] = ticket
        self._count(len(lengths))
        self._line.append(ticket)
        self._fill()
        try:
            if not ticket.admitted.done():
                ends_of_line: list[asyncio.Future[Any]] = [ticket.admitted, ticket.done]
                with waiting_in_line():
                    await asyncio.wait(ends_of_line, return_when=asyncio.FIRST_COMPLETED)
            status = await ticket.done
        except asyncio.CancelledError:
            self._stop(ticket)  # as SGLang, when a client disconnects
            raise
        finally:
            del self._tickets[group]
            self._count(-ticket.unfinished)
        if status is SampleStatus.ABORTED:
            self._left[group.feed_index] = self._stop(ticket)
        return status, ticket.born

    def _count(self, requests: int) -> None:
        """Add requests to those in flight, or take some away if `requests` is negative."""
        now = self._clock.monotonic()
        if self.in_flight:
            self.busy_seconds += now - self._busy_since
        self._busy_since = now
        self.in_flight += requests

    async def abort(self, group: Group | None = None) -> None:
        tickets = list(self._tickets.values())
        if group is not None:
            tickets = [self._tickets[group]] if group in self._tickets else []
        for ticket in tickets:
            if not ticket.done.done():
                ticket.done.set_result(SampleStatus.ABORTED)

    def _stop(self, ticket: _Ticket) -> list[float]:
        """Give a ticket's permits to others, and return the work that it still had to do."""
        now = self._work_clock()
        left = [max(0.0, end - now) for end in ticket.ends.values()] + ticket.waiting
        self.worked_seconds -= sum(left) - sum(ticket.waiting)
        self._occupy(-len(ticket.ends))
        ticket.ends, ticket.waiting = {}, []
        self._fill()
        return left or [0.0]

    # The work clock, and what happens when on it
    def _work_clock(self) -> float:
        now = self._paused_at if self._pauses else self._clock.monotonic()
        return now - self._paused_seconds

    def _occupy(self, permits: int) -> None:
        """Take permits, or give them back if `permits` is negative. Every request that has one draws tokens."""
        now = self._work_clock()
        self._drawn += (now - self._drawn_at) * self._taken * TOKENS_PER_SECOND
        self._drawn_at = now
        self._taken += permits

    def _fill(self) -> None:
        """Give free permits to the tickets first in line."""
        now = self._work_clock()
        while self._line and self._taken < self._permits:
            ticket = self._line[0]
            if not ticket.waiting:
                self._line.popleft()
                continue
            seconds = ticket.waiting.pop()
            self._serial += 1
            self._occupy(1)
            self.worked_seconds += seconds
            ticket.ends[self._serial] = now + seconds
            if ticket.born is None:
                ticket.born = self.version
                ticket.admitted.set_result(None)
            heappush(self._running, (now + seconds, self._serial, ticket))
        self._set_timer()

    def _set_timer(self) -> None:
        """The timer is set for the request that ends first. It is not set while the engines are paused."""
        at = self._running[0][0] + self._paused_seconds if self._running and not self._pauses else None
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, self._end_requests)

    def _end_requests(self) -> None:
        self._timer = None
        end = self._running[0][0]  # the timer was set for it; the clock may differ in its last bit
        while self._running and self._running[0][0] <= end:
            _, serial, ticket = heappop(self._running)
            if ticket.ends.pop(serial, None) is None:
                continue  # it was stopped
            self._occupy(-1)
            self._count(-1)
            ticket.unfinished -= 1
            if not ticket.unfinished and not ticket.done.done():
                ticket.done.set_result(SampleStatus.COMPLETED)
        self._fill()

    def _stall(self) -> None:
        self._stand_still()
        loop = asyncio.get_running_loop()
        loop.call_later(self._model.stall_seconds, self._go_on)
        loop.call_later(self._model.stall_every or 0.0, self._stall)

    def _stand_still(self) -> None:
        if not self._pauses:
            self._paused_at = self._clock.monotonic()
        self._pauses += 1
        self._set_timer()

    def _go_on(self) -> None:
        if not self._pauses:
            return  # as SGLang, which a delayed call of a lost rollout worker may ask to continue once more
        self._pauses -= 1
        if not self._pauses:
            self._paused_seconds += self._clock.monotonic() - self._paused_at
        self._set_timer()

    # WeightChannel
    async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None:
        await self._clock.sleep(self._model.stage_seconds)

    async def send(self, version: int, engine: str) -> SendOutcome:
        await self._clock.sleep(self._model.write_seconds)
        return SendOutcome(engine=engine, seconds=self._model.write_seconds, bytes=1)

    async def connect(self, engines: Sequence[str]) -> None: ...

    async def compare(self, engine: str) -> str | None:
        return None

    async def drop(self, engine: str) -> None: ...

    async def fall_back(self, engine: str) -> str | None:
        return None

    # Fleet
    def members(self) -> Sequence[str]:
        """None to watch over: nothing fails here."""
        return ()

    def routed(self) -> Sequence[str]:
        return ["engine-0"]

    def serving(self) -> bool:
        return bool(self.routed())

    async def loads(self) -> Sequence[EngineLoad]:
        self._occupy(0)
        drawn = int(self._drawn)
        load = EngineLoad(
            source="e",
            kv_usage=self._taken / self._permits,
            queued=self.in_line,
            generated=drawn,
            held=drawn if self._taken else 0,
        )
        return [load for _ in self.routed()]

    async def pause(self, mode: str) -> None:
        self._stand_still()

    async def commit(self, engine: str, version: int) -> None:
        self.version = version

    async def resume(self) -> None:
        self._go_on()

    async def fence(self, engine: str, reason: str) -> None:
        raise AssertionError("nothing fails here")

    async def admit(self, engine: str) -> None:
        raise AssertionError("nothing fails here")

    restart = dismiss = admit

    async def check(self, engine: str) -> None: ...

    async def offload(self) -> None:
        raise AssertionError("nothing is shared here")

    onload = offload

    async def check_router(self) -> None:
        raise AssertionError("nothing fails here")
