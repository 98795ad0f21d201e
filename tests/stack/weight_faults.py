"""Publishes under load while writes are lost, torn, refused, slow, or meet an engine that dies; then every token again.

Only the transport is tampered with: staging, checks, publisher, fleet and engines are the real ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.system.clock import SystemClock
from miles_async.adapters.weights.channel import Channel
from miles_async.adapters.weights.engine import EngineMemory
from miles_async.adapters.weights.source import WeightSource
from miles_async.adapters.weights.staging import Staging
from miles_async.errors import EngineLostError
from miles_async.events import Event, WriteFailed
from miles_async.pipeline.publish import Publisher
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.transports import Transport
from miles_async.types import Sample, SampleStatus
from tests.sim.world import DirectJournal, lifecycle_of
from tests.stack.engine_stack import Stack, group_of
from tests.stack.local_sources import LocalSources

TRANSPORTS = ("memory", "p2p", "broadcast", "disk")
PROMPTS = [[(7 * i + k) % 250 for i in range(60)] for k in range(4)]
DELAY_SECONDS = 0.15


class FaultyTransport:
    """A transport that does the next of `faults` at each send: `lost`, `torn`, `refused`, `slow`, `killed` or none."""

    def __init__(self, transport: Transport, faults: Iterator[str | None], kill: Callable[[str], None]) -> None:
        self._transport = transport
        self._faults = faults
        self._kill = kill
        self.device = transport.device
        self.connect, self.disconnect, self.prepare, self.close = (
            transport.connect,
            transport.disconnect,
            transport.prepare,
            transport.close,
        )

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        match next(self._faults, None):
            case "lost":
                return staging.buffer.numel()
            case "torn":
                half = copy(staging)
                half.plans = staging.plans[: len(staging.plans) // 2]
                return self._transport.send(half, engine)
            case "refused":
                raise EngineLostError("refused, as injected")
            case "slow":
                time.sleep(DELAY_SECONDS)
            case "killed":
                self._kill(engine.name)
        return self._transport.send(staging, engine)


@dataclass
class Outcome:
    """The results of a series of publishes."""

    steps: list[WriteFailed] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lost_requests: int = 0
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """The parameters of every version."""
    paused: list[float] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        if isinstance(event, WriteFailed):
            self.steps.append(event)

    def errors(self, stack: Stack) -> list[float]:
        """Of each span of each sample: the largest distance of its log-probabilities from those of its version."""
        now = [parameter.detach().clone() for parameter in stack.model.parameters()]
        distances = []
        by_version = [
            (span.version, sample, span.start, span.end)
            for sample in self.samples
            for span in sample.spans
            if span.end > span.start
        ]
        for version in sorted({entry[0] for entry in by_version}):
            load(stack, self.weights[version])
            distances += [stack.error(sample, start, end) for v, sample, start, end in by_version if v == version]
        load(stack, now)
        return distances


def load(stack: Stack, parameters: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for mine, given in zip(stack.model.parameters(), parameters, strict=True):
            mine.copy_(given)


def faulty(sources: LocalSources, faults: Iterator[str | None], kill: Callable[[str], None]) -> None:
    """Tamper with every transport of sources that were not used yet."""

    def tamper(source: WeightSource) -> None:
        opened: Any = source._open
        changed: Any = source
        changed._open = lambda transport: FaultyTransport(opened(transport), faults, kill)

    for source in sources.all:
        assert isinstance(source, WeightSource)
        tamper(source)


async def publish_under_load(
    stack: Stack,
    fleet: SGLangFleet,
    generator: SGLangGenerator,
    folder: Path,
    *,
    engines: Sequence[EngineInfo],
    faults: Iterator[str | None],
    publishes: int,
    streams: int,
    new_tokens: int,
    kill: Callable[[str], None] = lambda engine: None,
    repair: Callable[[str], EngineInfo] | None = None,
) -> Outcome:
    """`kill` ends an engine, `repair` restarts it if it is dead and returns its address."""
    outcome = Outcome()
    run_state = RunState(SystemClock(), DirectJournal(outcome))
    known = {engine.name: engine for engine in engines}
    sources = LocalSources(stack.named_tensors, folder, timeout=30.0)
    faulty(sources, faults, kill)
    channel = Channel(TRANSPORTS, sources, known.__getitem__)
    await channel.connect(list(known))
    over = asyncio.Event()

    async def stream(number: int) -> None:
        while not over.is_set():
            group = group_of(PROMPTS[number % len(PROMPTS)], samples=2)
            try:
                await generator.generate(group, SamplingParams(max_new_tokens=new_tokens))
            except EngineLostError:
                outcome.lost_requests += 1
            outcome.samples += [sample for sample in group if sample.status is not SampleStatus.PENDING]

    async with TaskSupervisor() as tasks:
        publisher = Publisher(
            run_state=run_state,
            lifecycle=lifecycle_of(run_state),
            tasks=tasks,
            channel=channel,
            fleet=fleet,
            pause_mode="retract",
            request_seconds=30.0,
            queue_depth=lambda: 0,
            on_live=lambda: None,
        )
        first = next(stack.versions)
        running: list[asyncio.Task[None]] = []
        for version in range(first, first + publishes):
            next(stack.versions)
            stack.change_weights()
            outcome.weights[version] = [parameter.detach().clone() for parameter in stack.model.parameters()]
            await publisher.stage(version, [])
            await publisher.publish()
            for lost in known.keys() - set(fleet.routed()):
                assert repair is not None, f"{lost} was fenced: {outcome.steps[-1].error}"
                known[lost] = await asyncio.to_thread(repair, lost)
                await rejoin(fleet, channel, version, known[lost])
            running = running or [tasks.spawn(f"stream {number}", stream(number)) for number in range(streams)]
            await asyncio.sleep(0.1)
        over.set()
        await asyncio.gather(*running)
    sources.close()
    return outcome


async def rejoin(fleet: SGLangFleet, channel: Channel, version: int, engine: EngineInfo) -> None:
    """Give an engine that was fenced the version that is live, then requests."""
    fleet.register_engine(engine)
    await channel.connect([*fleet.routed(), engine.name])
    for _ in range(20):
        outcome = await channel.send(version, engine.name)
        if outcome.error is None:
            break
    await fleet.commit(engine.name, version)
    await fleet.admit(engine.name)
