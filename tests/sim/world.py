"""A whole outside world under virtual time: data, rewards, learner; the engines are in engines.py.

Only the ports are replaced. What runs between them is `miles_async.pipeline.service` itself.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from miles_async.adapters.system.clock import SystemClock
from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, UserError
from miles_async.events import Event, EventSink, RunStarted
from miles_async.pipeline.checkpoint import resume
from miles_async.pipeline.evaluate import EvalSet
from miles_async.pipeline.held_prompts import HeldPrompts
from miles_async.pipeline.journal import EventOutbox, Journal
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.pipeline.run_ports import EvaluationFunction, Ports, RunFunctions
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.service import Service
from miles_async.ports import DataSource, Generator, RunStore
from miles_async.scheduling.bounds import Bounds, Schedule
from miles_async.scheduling.window import FIFOWindow
from miles_async.stored_run import Changes, StoredRun
from miles_async.types import FROM_DATASET, DropReason, Group, LearnerProgress, Sample, StepReport, Verdict
from tests.audit import Audit
from tests.sim.engines import EngineModel, Engines, Latency
from tests.sim.virtual_time import VirtualClock, run_virtual


class Trace:
    """Keeps every event of the given kinds; of all, where none is given."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = kinds or (Event,)
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, self._kinds):
            self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class DirectOutbox:
    """Hands events to a sink as soon as they are stored."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self.received = 0

    def put(self, number: int, events: Sequence[Event]) -> None:
        self.received = number
        for event in events:
            self._sink.emit(event)


class NullStore:
    """Implements the `RunStore` port without storing anything."""

    async def write(self, changes: Changes) -> None: ...

    async def read(self) -> StoredRun | None:
        return None

    async def load(self, sequence: int) -> list[Sample]:
        raise FatalError(f"group {sequence} is not stored")

    async def load_posted(self, feed_index: str) -> list[Sample]:
        raise FatalError(f"group {feed_index} is not stored")


class DirectJournal(Journal):
    """Stores nothing, and passes each event on at once."""

    def __init__(self, sink: EventSink) -> None:
        super().__init__(NullStore(), DirectOutbox(sink), SystemClock())
        self.emit = sink.emit  # type: ignore[method-assign]


class Feed:
    """Prompts without end, or `total` of them; returned ones first in line."""

    def __init__(self, samples_per_group: int = 1, total: int | None = None) -> None:
        self._samples_per_group = samples_per_group
        self._total = total
        self._next = 0
        self._returned: deque[Group] = deque()
        self.metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int, adapter: str = "") -> list[Group]:
        groups: list[Group] = []
        while len(groups) < num_samples:
            if returned := next((group for group in self._returned if group.adapter == adapter), None):
                self._returned.remove(returned)
                groups.append(returned)
            elif self._total is None or self._next < self._total:
                name, first = f"sample_0_{self._next}", self._next * self._samples_per_group
                indices = range(first, first + self._samples_per_group)
                origin = {FROM_DATASET: {"name": adapter, "epochs": 0.0, "adapter": adapter}} if adapter else {}
                samples = [Sample(index=i, prompt="?", metadata={"feed_index": name, **origin}) for i in indices]
                groups.append(Group(samples, feed_index=name))
                self._next += 1
            else:
                break
        return groups

    def add_samples(self, samples: Sequence[Group]) -> None:
        groups = [Group.of(group) for group in samples]
        for group in groups:
            group.put_back()
            if (count := len(group.trajectories)) != self._samples_per_group:
                raise UserError(f"group {group.feed_index} has {count} of {self._samples_per_group} samples")
        self._returned.extend(groups)

    def returned(self) -> list[Group]:
        return list(self._returned)

    def metadata_changed(self) -> None:
        """Each position copies the metadata."""

    def position(self) -> dict[str, Any]:
        return {"next": self._next, "samples": self._samples_per_group, "metadata": dict(self.metadata)}

    def seek(self, position: Mapping[str, Any]) -> None:
        if (size := position["samples"]) != self._samples_per_group:
            raise UserError(f"the position is of groups of {size} samples, not {self._samples_per_group}")
        self._next, self.metadata = position["next"], dict(position["metadata"])
        self._returned.clear()


@dataclass
class Trainer:
    """Takes `seconds` per batch."""

    clock: VirtualClock
    seconds: float
    finite: Callable[[int], bool]
    keeps_batches: bool
    batches: list[list[str]] = field(default_factory=list)
    """The feed indices of every batch, where it keeps them."""
    packed: list[int | None] = field(default_factory=list)
    """The sequence numbers of the groups of the batch that was packed last."""
    packed_before: list[bool] = field(default_factory=list)
    """For each batch, whether it was packed before it was trained."""
    save_seconds: float = 1.0
    save_error: str | None = None
    worked: list[tuple[float, float | None]] = field(default_factory=list)
    """When it worked; the last ends may be open."""
    copied: int | None = None
    """The rollout whose checkpoint is being written."""
    saved: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The progress in each checkpoint, by rollout."""

    def pack(self, groups: Sequence[Group]) -> None:
        self.packed = [group.sequence for group in groups]

    def was_packed(self, groups: Sequence[Group]) -> bool:
        return self.packed == [group.sequence for group in groups]

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        self.packed_before.append(self.was_packed(groups))
        with self._working():
            await self.clock.sleep(self.seconds)
        if self.keeps_batches:
            self.batches.append([group.feed_index for group in groups])
        tokens = sum(len(sample.tokens) for group in groups for sample in group)
        return StepReport(seconds=self.seconds, tokens=tokens, finite=self.finite(rollout_id))

    async def progress(self) -> LearnerProgress:
        raise AssertionError("no rollout worker is lost here")

    async def work_seconds(self) -> float:
        return sum((self.clock.monotonic() if end is None else end) - start for start, end in self.worked)

    @contextmanager
    def _working(self) -> Iterator[None]:
        number, start = len(self.worked), self.clock.monotonic()
        self.worked.append((start, None))
        yield
        self.worked[number] = start, self.clock.monotonic()

    async def offload(self) -> None:
        raise AssertionError("nothing is shared here")

    onload = offload

    async def copy_state(self, rollout_id: int) -> None:
        assert self.copied is None, "one checkpoint at a time"
        self.copied = rollout_id

    async def write_state(self, rollout_id: int, progress: Mapping[str, Any]) -> None:
        assert self.copied == rollout_id
        with self._working():
            await self.clock.sleep(self.save_seconds)
        if self.save_error is not None:
            raise FatalError(self.save_error)
        self.saved[rollout_id] = json.loads(json.dumps(progress))
        self.copied = None


@dataclass
class Judge:
    """Takes `seconds` per group."""

    clock: VirtualClock
    seconds: float

    async def score(self, group: Group) -> None:
        if self.seconds:
            await self.clock.sleep(self.seconds)
        for sample in group:
            sample.reward = 1.0 if sample.reward is None else sample.reward


@dataclass
class DeadLetterBox:
    letters: list[tuple[str, DropReason, str]] = field(default_factory=list)

    @property
    def prompts(self) -> set[str]:
        return {feed_index for feed_index, _, _ in self.letters}

    def dead_letter(self, group: Group, reason: DropReason, error: str) -> None:
        self.letters.append((group.feed_index, reason, error))


def lifecycle_of(run_state: RunState, data: DataSource | None = None) -> GroupLifecycle:
    data = Feed() if data is None else data
    return GroupLifecycle(run_state, data, DeadLetterBox(), max_attempts=3, first_attempts=32)


def held_prompts_of(
    run_state: RunState, data: DataSource | None = None, *, limit: int = 1000, keeps_groups: bool | None = False
) -> HeldPrompts:
    """What a rollout function holds in a run that has no window."""
    data = Feed() if data is None else data
    lifecycle = lifecycle_of(run_state, data)
    return HeldPrompts(
        run_state,
        lifecycle,
        data,
        skip=lambda sequence: None,
        samples_per_group=1,
        limit=limit,
        keeps_groups=keeps_groups,
    )


@dataclass(kw_only=True)
class World:
    """One simulated run. `run()` runs it to the end; its fields then hold the results."""

    config: RunConfig
    schedule: Schedule = Schedule.FULLY_ASYNC
    latency: Latency = lambda group, rng: rng.lognormvariate(0.0, 1.0)
    engines: EngineModel = field(default_factory=EngineModel)
    train_seconds: float = 1.0
    save_seconds: float = 1.0
    """Seconds that writing a checkpoint takes."""
    save_error: str | None = None
    """And fails with this."""
    reward_seconds: float = 0.0
    keep: Callable[[Group], bool | Verdict] = lambda group: True
    prompts: int | None = None
    processors: float = 0.0
    """Fraction of the machine's processors in use."""
    seed: int = 0
    finite: Callable[[int], bool] = lambda rollout_id: True
    sinks: tuple[Any, ...] = ()
    """More event sinks, called beside the trace."""
    trace: Trace = field(default_factory=Trace)
    keeps_batches: bool = True
    resume_from: Mapping[str, Any] | None = None
    """The progress in the checkpoint of another run."""
    problems: int = 0
    """To evaluate on."""
    evaluate: EvaluationFunction | None = None
    dead_letters: DeadLetterBox = field(default_factory=DeadLetterBox)
    window: Callable[[int], FIFOWindow[Group]] | None = None
    """Makes another window of size W, to compare with."""
    engine_kind: type[Engines] = Engines
    trainer_kind: type[Trainer] = Trainer
    choose: Callable[[list[Group]], list[Group]] | None = None
    """An over-sampling filter of the batch functions."""
    wall_clock_steps: Mapping[float, float] = field(default_factory=dict)
    """Seconds by which the wall clock is set, by the time at which that happens."""

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

    @property
    def returned(self) -> set[str]:
        """Prompts that wait for another attempt, in the feed or in quarantine."""
        waiting = [*self.feed.returned(), *self.service.lifecycle.quarantine.waiting]
        return {group.feed_index for group in waiting}

    def emit(self, event: Event) -> None:
        for sink in (self.trace, *self.sinks):
            sink.emit(event)
        self.audit.observe(event)

    def run(self) -> Self:
        run_virtual(self._run())
        return self

    async def _run(self) -> None:
        clock = VirtualClock()
        for at, seconds in self.wall_clock_steps.items():
            asyncio.get_running_loop().call_at(at, clock.step_wall_clock, seconds)
        self.fleet = self.engine_kind(clock, self.latency, self.engines, self.seed)
        self.trainer = self.trainer_kind(
            clock,
            self.train_seconds,
            self.finite,
            self.keeps_batches,
            save_seconds=self.save_seconds,
            save_error=self.save_error,
        )
        self.emit(self._run_started(clock))
        await self._serve(clock, NullStore(), None)
        self.service.lifecycle.ledger.check_conservation()
        self.seconds = clock.monotonic()

    async def _serve(self, clock: VirtualClock, store: RunStore, stored: StoredRun | None) -> None:
        """Run one rollout worker to its end."""
        self.feed = Feed(self.config.rollout.n_samples_per_prompt, self.prompts)
        outbox = self._outbox()
        self.journal = Journal(
            store,
            outbox,
            clock,
            number=max(outbox.received, 0 if stored is None else stored.number),
            retains_trained=self.config.restarts_learner,
        )
        first_rollout = 0
        if self.resume_from is not None:
            first_rollout = self.resume_from["rollout"] + 1
            if stored is None:
                resume(self.resume_from, self.feed, self.journal)
        self.service = Service(
            self.config,
            self.bounds,
            self._ports(clock),
            schedule=self.schedule,
            first_rollout=first_rollout,
            stored=stored,
        )
        if self.window is not None:
            self.service._producer.lines[""].window = self.window(self.bounds.window)
        await self.service.run()

    def _outbox(self) -> EventOutbox:
        return DirectOutbox(self)

    def _ports(self, clock: VirtualClock) -> Ports:
        engines = self.fleet
        problems = [Group([Sample(index=i)], feed_index=f"eval_{i}") for i in range(self.problems)]
        return Ports(
            clock=clock,
            journal=self.journal,
            data=self.feed,
            generator=self._generator(clock),
            rewarder=Judge(clock, self.reward_seconds),
            learner=self.trainer,
            channel=engines,
            fleet=engines,
            dead_letters=self.dead_letters,
            dynamic_filter=lambda group: Verdict.of(self.keep(group)),
            text_of=lambda ids: " ".join(map(str, ids)),
            functions=RunFunctions(rollout=self._rollout_function(), prepare=self._prepare, evaluate=self.evaluate),
            packs_ahead=True,
            eval_sets=[EvalSet(name="held_out", problems=problems, generator=engines)],
            on_rollout=self._on_rollout,
            processors=lambda: self.processors,
        )

    def _run_started(self, clock: VirtualClock) -> RunStarted:
        return RunStarted(
            time=clock.time(),
            run="sim",
            entry="train.py" if self.schedule is Schedule.SYNCHRONOUS else "train_async.py",
            rollouts=self.config.rollout.num_rollout,
            groups_per_rollout=self.config.rollout.rollout_batch_size,
            samples_per_group=self.config.rollout.n_samples_per_prompt,
            queue_capacity=self.config.rollout.queue_capacity,
            window=self.bounds.window,
            slots=self.bounds.slots,
            in_flight=self.bounds.in_flight,
            max_kv_staleness=self.config.weights.max_kv_staleness,
            longest_response=self.config.rollout.rollout_max_response_len,
            model="sim",
            configuration="sim",
        )

    def _generator(self, clock: VirtualClock) -> Generator:
        return self.fleet

    def _rollout_function(self) -> RolloutFunction | None:
        """If None, batches come directly from the queue."""
        return None if self.schedule is Schedule.FULLY_ASYNC else self._rollout

    async def _prepare(self, rollout_id: int, groups: list[Group]) -> None:
        """Called with each batch before it is trained."""

    def _on_rollout(self, rollout_id: int) -> None:
        """Called when the collection of a batch begins."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        size = self.config.rollout.rollout_batch_size
        return await source.collect_batch(rollout_id, size, self.bounds.generation_batch, self.choose)
