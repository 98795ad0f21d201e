"""A whole outside world under virtual time: data, engines, rewards, learner and weight channel.

Only the ports are replaced. What runs between them is `miles_async.pipeline.service` itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_async.errors import BadTrajectory
from miles_async.observability.events import Event
from miles_async.types import DropReason, Group, Sample, SampleStatus, StepReport, VersionSpan, WriteOutcome
from tests.sim.virtual_time import VirtualClock


class Trace:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Feed:
    """Prompts without end, or `total` of them; returned ones first in line."""

    def __init__(self, samples_per_group: int = 1, total: int | None = None) -> None:
        self._samples_per_group = samples_per_group
        self._total = total
        self._next = 0
        self._returned: deque[Group] = deque()

    def get_samples(self, num_samples: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < num_samples:
            if self._returned:
                groups.append(self._returned.popleft())
            elif self._total is None or self._next < self._total:
                first = self._next * self._samples_per_group
                samples = [Sample(index=first + i, prompt="?") for i in range(self._samples_per_group)]
                groups.append(Group(samples, feed_index=f"sample_0_{self._next}"))
                self._next += 1
            else:
                break
        return groups

    def add_samples(self, samples: Sequence[Group]) -> None:
        self._returned.extend(samples)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]


class Engines:
    """One engine that samples under its present version: Generator, Fleet and WeightChannel at once.

    A group's latency is `latency(group, rng)` seconds; a publish in the middle splits its span.
    """

    def __init__(
        self,
        clock: VirtualClock,
        latency: Callable[[Group, random.Random], float],
        *,
        seed: int = 0,
        failure_rate: float = 0.0,
        stage_seconds: float = 0.0,
        write_seconds: float = 0.0,
    ) -> None:
        self._clock = clock
        self._latency = latency
        self._rng = random.Random(seed)
        self._failure_rate = failure_rate
        self._stage_seconds = stage_seconds
        self._write_seconds = write_seconds
        self._aborting: set[asyncio.Event] = set()
        self.version = -1
        self.in_flight = 0
        self.busy_seconds = 0.0
        self._busy_since = 0.0

    # Generator
    async def generate(self, group: Group) -> None:
        born = self.version
        latency = self._latency(group, self._rng)
        fails = self._rng.random() < self._failure_rate
        aborted = asyncio.Event()
        self._aborting.add(aborted)
        self._enter()
        try:
            await asyncio.wait_for(aborted.wait(), latency)
            status = SampleStatus.ABORTED
        except TimeoutError:
            status = SampleStatus.COMPLETED
        finally:
            self._leave()
            self._aborting.discard(aborted)
        if fails and status is SampleStatus.COMPLETED:
            raise BadTrajectory("injected failure")
        spans = [VersionSpan(version, i, i + 1) for i, version in enumerate(range(born, self.version + 1))]
        for sample in group:
            sample.spans = spans
            sample.response_length = len(spans)
            sample.tokens = [0] * (1 + len(spans))
            sample.status = status

    async def abort(self) -> None:
        for event in self._aborting:
            event.set()

    def _enter(self) -> None:
        if self.in_flight == 0:
            self._busy_since = self._clock.now()
        self.in_flight += 1

    def _leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.busy_seconds += self._clock.now() - self._busy_since

    # WeightChannel
    name = "virtual"

    async def stage(self, version: int) -> None:
        await self._clock.sleep(self._stage_seconds)

    async def write(self, version: int, engines: Sequence[str]) -> list[WriteOutcome]:
        await self._clock.sleep(self._write_seconds)
        return [WriteOutcome(engine=engine, seconds=self._write_seconds, bytes=1) for engine in engines]

    # Fleet
    def routed(self) -> Sequence[str]:
        return ["engine-0"]

    async def pause(self, mode: str) -> None:
        pass

    async def commit(self, engine: str, version: int) -> None:
        self.version = version

    async def resume(self) -> None:
        pass

    async def fence(self, engine: str, reason: str) -> None:
        raise AssertionError("nothing fails here")


@dataclass
class Trainer:
    """Takes `seconds` per batch."""

    clock: VirtualClock
    seconds: float
    batches: list[list[str]] = field(default_factory=list)

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        started = self.clock.now()
        await self.clock.sleep(self.seconds)
        self.batches.append([group.feed_index for group in groups])
        return StepReport(started=started, ended=self.clock.now(), tokens=len(groups), finite=True)


class Judge:
    async def score(self, group: Group) -> None:
        for sample in group:
            sample.reward = 1.0


@dataclass
class Graveyard:
    buried: list[tuple[str, DropReason, str]] = field(default_factory=list)

    def bury(self, group: Group, reason: DropReason, error: str) -> None:
        self.buried.append((group.feed_index, reason, error))
