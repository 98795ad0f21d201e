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

from miles_async.config.schema import RunConfig
from miles_async.core.bounds import Bounds, Schedule
from miles_async.errors import BadTrajectory
from miles_async.observability.audit import Audit
from miles_async.observability.events import Event, RunStarted
from miles_async.pipeline.service import Ports, Service
from miles_async.pipeline.source import RolloutSource
from miles_async.types import DropReason, Group, Sample, SampleStatus, StepReport, VersionSpan, WriteOutcome
from tests.sim.virtual_time import VirtualClock, run_virtual


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
        self._aborting: dict[int, asyncio.Event] = {}
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
        self._aborting[id(group)] = aborted
        self._enter()
        try:
            await asyncio.wait_for(aborted.wait(), latency)
            status = SampleStatus.ABORTED
        except TimeoutError:
            status = SampleStatus.COMPLETED
        finally:
            self._leave()
            del self._aborting[id(group)]
        if fails and status is SampleStatus.COMPLETED:
            raise BadTrajectory("injected failure")
        spans = [VersionSpan(version, i, i + 1) for i, version in enumerate(range(born, self.version + 1))]
        for sample in group:
            sample.spans = spans
            sample.response_length = len(spans)
            sample.tokens = [0] * (1 + len(spans))
            sample.status = status

    async def abort(self, group: Group | None = None) -> None:
        for event in list(self._aborting.values()) if group is None else [self._aborting[id(group)]]:
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
    finite: Callable[[int], bool]
    batches: list[list[str]] = field(default_factory=list)

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        started = self.clock.now()
        await self.clock.sleep(self.seconds)
        self.batches.append([group.feed_index for group in groups])
        return StepReport(started=started, ended=self.clock.now(), tokens=len(groups), finite=self.finite(rollout_id))


class Judge:
    async def score(self, group: Group) -> None:
        for sample in group:
            sample.reward = 1.0


@dataclass
class Graveyard:
    buried: list[tuple[str, DropReason, str]] = field(default_factory=list)

    def bury(self, group: Group, reason: DropReason, error: str) -> None:
        self.buried.append((group.feed_index, reason, error))


Latency = Callable[[Group, random.Random], float]


@dataclass(kw_only=True)
class World:
    """One simulated run. `run()` plays it to the end; the fields then say what came of it."""

    config: RunConfig
    schedule: Schedule = Schedule.FULLY_ASYNC
    latency: Latency = lambda group, rng: rng.lognormvariate(0.0, 1.0)
    train_seconds: float = 1.0
    failure_rate: float = 0.0
    stage_seconds: float = 0.01
    write_seconds: float = 0.02
    keep: Callable[[Group], bool] = lambda group: True
    prompts: int | None = None
    seed: int = 0
    finite: Callable[[int], bool] = lambda rollout_id: True
    sinks: tuple[Any, ...] = ()
    """More event sinks, called beside the trace."""
    trace: Trace = field(default_factory=Trace)
    graveyard: Graveyard = field(default_factory=Graveyard)

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        self.bounds = Bounds.derive(
            rollout_batch_size=rollout.rollout_batch_size,
            over_sampling_batch_size=rollout.over_sampling_batch_size,
            windowed_fifo_ratio=rollout.windowed_fifo_ratio,
            max_weight_staleness=rollout.max_weight_staleness,
            update_weights_interval=self.config.weights.update_weights_interval,
            queue_capacity=rollout.queue_capacity,
            schedule=self.schedule,
        )
        self.audit = Audit(rollout.max_weight_staleness, windowed=self.schedule is Schedule.FULLY_ASYNC)
        self.seconds = 0.0

    def emit(self, event: Event) -> None:
        for sink in (self.trace, *self.sinks):
            sink.emit(event)
        self.audit.observe(event)

    def run(self) -> World:
        run_virtual(self._run())
        return self

    async def _run(self) -> None:
        clock = VirtualClock()
        engines = Engines(
            clock,
            self.latency,
            seed=self.seed,
            failure_rate=self.failure_rate,
            stage_seconds=self.stage_seconds,
            write_seconds=self.write_seconds,
        )
        self.trainer = Trainer(clock, self.train_seconds, self.finite)
        self.feed = Feed(self.config.rollout.n_samples_per_prompt, self.prompts)
        self.service = Service(
            self.config,
            self.bounds,
            Ports(
                clock=clock,
                events=self,
                data=self.feed,
                generator=engines,
                evaluator=engines,
                rewarder=Judge(),
                learner=self.trainer,
                channel=engines,
                fleet=engines,
                dead_letters=self.graveyard,
                keep=self.keep,
                problems=(),
            ),
            take_turns=self.schedule is Schedule.TURNS,
        )
        self.emit(
            RunStarted(
                time=clock.now(),
                run="sim",
                entry="sim",
                rollouts=self.config.rollout.num_rollout,
                groups_per_rollout=self.config.rollout.rollout_batch_size,
                samples_per_group=self.config.rollout.n_samples_per_prompt,
                queue_capacity=self.config.rollout.queue_capacity,
                window=self.bounds.window,
                slots=self.bounds.slots,
                weight_transfer="virtual",
            )
        )
        await self.service.run(self._rollout)
        self.service.books.ledger.check_conservation()
        self.seconds = clock.now()

    async def _rollout(self, rollout_id: int, source: RolloutSource) -> list[Group]:
        size = self.config.rollout.rollout_batch_size
        if self.schedule is Schedule.FULLY_ASYNC:
            return await source.drain_stream(rollout_id, size)
        return await source.collect_batch(rollout_id, size, self.bounds.generation_batch)
