"""A simulated run whose rollout worker is killed again and again; everything outside of it goes on."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from miles_async.adapters.agents.conversation import InvalidRequestError
from miles_async.adapters.agents.trajectories import BufferFullError, TrajectoryBuffer
from miles_async.config.schema import Fault
from miles_async.errors import FatalError
from miles_async.events import Event
from miles_async.fault_points import FaultPoints
from miles_async.json_values import json_value
from miles_async.pipeline.journal import EventOutbox
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.pipeline.run_ports import Ports
from miles_async.ports import RunStore
from miles_async.rollout import external_rollout
from miles_async.scheduling.lineage import Lineage
from miles_async.stored_run import Changes, StoredContent, StoredGroup, StoredRun
from miles_async.types import Group, LearnerProgress, Sample, SendOutcome, StepReport
from tests.sim.engines import Engines
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Trainer, World
from workers.faults import FaultInjector, FaultSchedule, at_fault_points

KILLS_WORKERS = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("tasks_of_killed_workers_are_gone"),
]
"""Marks of tests that kill workers, whose tasks do not end in an orderly way."""

RANKS = 3
START_SECONDS = 5.0
"""Until another rollout worker has started."""

SURVIVED_FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "delay", "point": "store.write.before", "seconds": 3.0, "times": 30},
    {"kind": "delay", "point": "store.write.after", "seconds": 3.0, "times": 30},
    {"kind": "delay", "point": "learner.train.*", "seconds": 20.0, "times": 3},
    {"kind": "delay", "point": "learner.write_state.*", "seconds": 20.0, "times": 3, "within": 3},
    {"kind": "delay", "point": "channel.*", "seconds": 20.0, "times": 3},
    {"kind": "delay", "point": "fleet.*", "seconds": 20.0, "times": 3},
    {"kind": "delay", "point": "rewarder.score.*", "seconds": 20.0, "times": 30},
    {"kind": "error", "point": "generator.generate.*", "times": 3},
    {"kind": "error", "point": "rewarder.score.*", "times": 5},
    {"kind": "clock_jump", "point": "*", "seconds": -3600.0},
    {"kind": "clock_jump", "point": "*", "seconds": 3600.0},
    {"kind": "poison", "point": "generator.generate.after", "times": 5},
)
"""Faults that a run survives without the loss of a process."""

T = TypeVar("T")


class KilledError(BaseException):
    """Raised inside a rollout worker that is dead, so that nothing in it goes on. No handler catches it."""


def _copy(value: T) -> T:
    """A copy that shares nothing with the original. This is faster than `copy.deepcopy`."""
    copied: T = pickle.loads(pickle.dumps(value))
    return copied


def _summary(group: Group) -> StoredContent:
    versions = {span.version for sample in group for span in sample.spans}
    return StoredContent(sorted(versions) if all(sample.spans for sample in group) else [], group.response_tokens)


def _as_stored(samples: Sequence[Sample]) -> list[Sample]:
    """A copy with the values that JSON can express."""
    return [Sample.from_dict(_copy(sample.to_dict())) for sample in samples]


class MemoryStore:
    """Keeps what was written, as a database would: nothing in it is shared with the rollout worker."""

    def __init__(self) -> None:
        self._number = 0
        self._groups: dict[int, tuple[int, StoredGroup]] = {}
        self._contents: dict[int, Group] = {}
        self.posted: dict[str, Group] = {}
        self._keys: dict[str, str] = {}
        self._prompts: dict[str, Group] = {}
        self._progress: dict[str, Any] = {}
        self._events: list[tuple[int, Sequence[Event]]] = []
        self.loaded: list[int] = []
        """Sequence numbers of the groups whose samples were loaded."""
        self.largest = 0
        """The most groups and prompts that were stored at once."""

    async def write(self, changes: Changes) -> None:
        assert changes.number > self._number
        self._number = changes.number
        for sequence, change in changes.groups.items():
            if change is None:
                self._groups.pop(sequence, None)
                self._contents.pop(sequence, None)
                continue
            if change.content is not None:
                self._contents[sequence] = _copy(change.content)
            content = self._contents.get(sequence)
            group = StoredGroup(
                sequence=sequence,
                feed_index=change.feed_index,
                attempt=change.attempt,
                state=change.state,
                adopted=change.adopted,
                rollout=change.rollout,
                content=None if content is None else _summary(content),
            )
            self._groups[sequence] = change.order, group
        self.posted |= _copy(dict(changes.posted))
        for key, name in changes.keys.items():
            if name is None:
                self._keys.pop(key, None)
            else:
                self._keys[key] = name
        for name, prompt in _copy(json_value(changes.prompts)).items():
            if prompt is None:
                self._prompts.pop(name, None)
                self.posted.pop(name, None)
            else:
                self._prompts[name] = Group.from_prompt_dict(prompt)
        self._progress |= _copy(json_value(dict(changes.progress)))
        if changes.events:
            self._events.append((changes.number, list(changes.events)))
        self._events = [entry for entry in self._events if entry[0] > changes.delivered]
        self.largest = max(self.largest, len(self._groups) + len(self._prompts))

    @property
    def announced_version(self) -> int:
        return int(self._progress.get("announced_version", -1))

    async def read(self) -> StoredRun | None:
        if not self._number:
            return None
        groups = [_copy(group) for _, group in sorted(self._groups.values(), key=lambda entry: entry[0])]
        return StoredRun(
            number=self._number,
            groups=groups,
            prompts=[_copy(group) for group in self._prompts.values()],
            posted=list(self.posted),
            keys=dict(self._keys),
            progress=_copy(self._progress),
            events=list(self._events),
        )

    async def load(self, sequence: int) -> list[Sample]:
        self.loaded.append(sequence)
        return self._samples_of(self._contents.get(sequence))

    async def load_posted(self, feed_index: str) -> list[Sample]:
        return self._samples_of(self.posted.get(feed_index))

    @staticmethod
    def _samples_of(group: Group | None) -> list[Sample]:
        if group is None:
            raise FatalError("the group is not stored")
        return _as_stored(group)


def _started_from(rollout: int, version: int, changed: str | None) -> LearnerProgress:
    return LearnerProgress(rollout=rollout, groups=(), report=None, version=version, staged=False, changed=changed)


@dataclass
class LastingTrainer(Trainer):
    """A learner that ends what it was asked for, whether or not the rollout worker still waits for it.

    Each rank receives its part of a batch in a separate call, and the last call lets all of them train.
    `kill` ends all ranks, and `restart` continues from the newest checkpoint.
    """

    ranks: LastingTrainer = field(init=False)
    """The ranks as the current rollout worker calls them."""
    received: dict[int, list[Group]] = field(default_factory=dict)
    """The batch that each rank has received last."""

    adapters: int = 1
    last: LearnerProgress = field(default_factory=lambda: _started_from(-1, 0, None))
    busy: set[asyncio.Task[Any]] = field(default_factory=set)
    death: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.ranks = self

    def kill(self) -> None:
        self.death.set()
        for task in self.busy:
            task.cancel()

    def restart(self) -> None:
        self.death = asyncio.Event()
        self.busy.clear()
        self.received.clear()
        self.copied = None
        rollout = max(self.saved, default=-1)
        del self.batches[rollout + 1 :]
        progress = self.saved.get(rollout, {"version": self.adapters - 1, "changed": None})
        self.last = _started_from(rollout, progress["version"], progress["changed"])

    async def work_seconds(self) -> float:
        self.require_alive()
        return await super().work_seconds()

    async def copy_state(self, rollout_id: int) -> None:
        self.require_alive()
        await super().copy_state(rollout_id)

    def require_alive(self) -> None:
        if self.death.is_set():
            raise FatalError("learner-0 died")

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        batch = list(groups)
        for rank in range(RANKS):
            await self.ranks.give_batch(rank, batch)
        report: StepReport = await self.ranks.on_all("train", rollout_id)
        return report

    async def give_batch(self, rank: int, groups: list[Group]) -> None:
        self.require_alive()
        self.received[rank] = groups

    async def on_all(self, method: str, rollout_id: int) -> Any:
        self.require_alive()
        assert method == "train", "the other calls are simulated as one call to all ranks"
        batches = [self.received.pop(rank) for rank in range(RANKS)]
        assert all(batch is batches[0] for batch in batches), "all ranks train the same batch"
        return await self._to_the_end(self._train(rollout_id, batches[0]))

    async def _train(self, rollout_id: int, groups: list[Group]) -> StepReport:
        report = await super().train(rollout_id, groups)
        sequences = [group.sequence or 0 for group in groups]
        changed = groups[0].adapter if report.finite else self.last.changed
        self.last = replace(self.last, rollout=rollout_id, groups=sequences, report=report, changed=changed)
        return report

    async def write_state(self, rollout_id: int, progress: Any) -> None:
        self.require_alive()
        await self._to_the_end(super().write_state(rollout_id, progress))

    async def stage(self, version: int, adapter: str, seconds: float) -> None:
        self.require_alive()
        await self._to_the_end(self._stage(version, adapter, seconds))

    async def _stage(self, version: int, adapter: str, seconds: float) -> None:
        await self.clock.sleep(seconds)
        changed = None if adapter == self.last.changed else self.last.changed
        self.last = replace(self.last, version=version, staged=True, changed=changed)

    async def progress(self) -> LearnerProgress:
        while self.busy:
            self.require_alive()
            await asyncio.wait(self.busy)
        self.require_alive()
        self.copied = None
        return self.last

    async def _to_the_end(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        self.busy.add(task)
        task.add_done_callback(self.busy.discard)
        death = asyncio.ensure_future(self.death.wait())
        try:
            await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        self.require_alive()
        return task.result()


class LastingEngines(Engines):
    """Engines whose requests of a dead rollout worker are aborted when another one connects."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.learner: LastingTrainer
        self.stored_version: Callable[[], float]

    async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None:
        assert self.stored_version() >= version, "another rollout worker could use the number for other weights"
        await self.learner.stage(version, adapter, self._model.stage_seconds)

    async def send(self, version: int, engine: str) -> SendOutcome:
        self.learner.require_alive()
        outcome = await super().send(version, engine)
        self.learner.require_alive()
        return outcome

    async def forget_requests(self) -> None:
        await self.abort()
        self.busy_seconds = 0.0  # the next rollout worker counts from the beginning
        while self._pauses:
            self._go_on()
        self._left.clear()


class Life:
    """One rollout worker, which is killed at a fault. After its death every call of a port raises KilledError."""

    def __init__(self, clock: VirtualClock, fault: Fault | None, seed: int) -> None:
        """Without a `fault`, the rollout worker lives to the end of the run."""
        self._faults = FaultSchedule([fault] if fault else [], seed)
        self.points = FaultPoints(self._reached, clock.sleep)
        self.kill: Callable[[], None] = lambda: None
        self.dead = False

    def _reached(self, point: str, arguments: Sequence[Any]) -> float:
        if not self.dead and self._faults.due(point):
            self.dead = True
            self.kill()
        if self.dead:
            raise KilledError
        return 0.0


@dataclass(kw_only=True)
class LostWorkers(World):
    """`kills` rollout workers are killed, each at a random call of a port.

    `learner_kills` learners are killed at random times.
    """

    kills: int = 3
    longest_life: int = 2000
    """The most calls of ports until a kill."""
    point: str | None = None
    """The fault point of all kills; None draws one for each."""
    learner_kills: int = 0
    longest_learner_life: float = 60.0
    """The most seconds between two kills of the learner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine_kind, self.trainer_kind = LastingEngines, LastingTrainer
        self.store = MemoryStore()
        self.stored: StoredRun | None = None
        """The state with which the current rollout worker began."""
        self.lives = 0
        self.received = 0

    async def _serve(self, clock: VirtualClock, store: Any, stored: StoredRun | None) -> None:
        assert isinstance(self.fleet, LastingEngines)
        assert isinstance(self.trainer, LastingTrainer)
        self.fleet.learner, self.fleet.stored_version = self.trainer, self._stored_version
        self.trainer.adapters = len(self.config.data.adapter_weights)
        if stored is None and self.resume_from is None:
            self.trainer.last = _started_from(-1, self.trainer.adapters - 1, None)
        if self.resume_from is not None:
            self.trainer.last = _started_from(self.resume_from["rollout"], self.trainer.adapters - 1, None)
        rng = random.Random(f"kills {self.seed}")
        killer = asyncio.ensure_future(self._kill_learners(clock, rng))
        kills = 0
        while True:
            kills += 1
            call, side = rng.randint(1, self.longest_life), rng.choice(("before", "after"))
            fault = Fault(kind="kill", point=self.point or f"*.{side}", call=call) if kills <= self.kills else None
            self.life = Life(clock, fault, self.seed)
            try:
                if await self._live(clock):
                    break
            except FatalError:
                if not self.trainer.death.is_set():
                    raise
            await clock.sleep(START_SECONDS)
            await self.fleet.forget_requests()
            if self.trainer.death.is_set():
                self.trainer.restart()
        killer.cancel()

    async def _kill_learners(self, clock: VirtualClock, rng: random.Random) -> None:
        assert isinstance(self.trainer, LastingTrainer)
        for _ in range(self.learner_kills):
            await clock.sleep(rng.uniform(0, self.longest_learner_life))
            self.trainer.kill()

    async def _live(self, clock: VirtualClock) -> bool:
        """Whether the run came to its end before the rollout worker was killed.

        Raises FatalError if the learner was killed.
        """
        self.lives += 1
        self.stored = stored = await self.store.read()
        for number, events in stored.events if stored is not None else ():
            self.put(number, events)
        worker = asyncio.ensure_future(super()._serve(clock, self._wrapped_store(), stored))
        self.life.kill = lambda: self._cancel_soon(worker)
        try:
            await worker
        except BaseException:
            if not self.life.dead:
                raise
            with suppress(BaseException):
                await worker
            return False
        return not self.life.dead

    def _stored_version(self) -> float:
        """The newest version that the store knows."""
        return self.store.announced_version

    @staticmethod
    def _cancel_soon(worker: asyncio.Future[None]) -> None:
        asyncio.get_running_loop().call_soon(worker.cancel)

    def _outbox(self) -> EventOutbox:
        outbox: EventOutbox = self.life.points.port("outbox", self)
        return outbox

    def put(self, number: int, events: Sequence[Event]) -> None:
        """The driver takes each batch of events once."""
        if number > self.received:
            self.received = number
            for event in events:
                self.emit(event)

    def _wrapped_store(self) -> RunStore:
        """The store as this rollout worker calls it."""
        store: RunStore = self.life.points.port("store", self.store)
        return store

    def _ports(self, clock: VirtualClock) -> Ports:
        assert isinstance(self.trainer, LastingTrainer)
        self.trainer.ranks = self.life.points.port("ranks", self.trainer)
        return at_fault_points(super()._ports(clock), self.life.points)

    @property
    def unfinished(self) -> set[str]:
        """Prompts that the run still owes."""
        return {group.feed_index for group in self.service.lifecycle.live_groups} | self.returned


@dataclass(kw_only=True)
class FaultyLostWorkers(LostWorkers):
    """Rollout workers and learners that are killed, and the faults of the configuration."""

    listed: Path
    """The file that lists the faults that have happened."""

    async def _live(self, clock: VirtualClock) -> bool:
        self.injector = FaultInjector(self.config.faults, self.listed, clock)
        return await super()._live(clock)

    def _stored_version(self) -> float:
        return inf  # a full disk must not keep the learner from training

    def _wrapped_store(self) -> RunStore:
        return self.injector.port("store", super()._wrapped_store())

    def _ports(self, clock: VirtualClock) -> Ports:
        return self.injector.ports(super()._ports(clock))


@dataclass(kw_only=True)
class LostWorkersOfAnExternalGenerator(LostWorkers):
    """The batches come from an external generator, which posts groups until each of them is acknowledged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffer: TrajectoryBuffer | None = None
        self.acknowledged: dict[str, str] = {}
        """Names of groups by idempotency key, in the order in which they were posted."""
        self.trained_keys: dict[str, str] = {}
        """The keys in the samples that were trained, by the name of the group."""

    async def _run(self) -> None:
        generator = asyncio.ensure_future(self._generate_forever())
        try:
            await super()._run()
        finally:
            generator.cancel()

    def _ports(self, clock: VirtualClock) -> Ports:
        rollout = self.config.rollout
        self.buffer = TrajectoryBuffer(
            rollout.queue_capacity,
            rollout.n_samples_per_prompt,
            log=self.journal,
            newest_version=lambda: self.service.run_state.live_version,
            stored=self.stored,
        )
        return replace(super()._ports(clock), restore_posted=self.buffer.restore)

    async def _generate_forever(self) -> None:
        rng = random.Random(f"generator {self.seed}")
        while True:
            # Some requests are repeated although they were answered.
            key = f"key {max(0, len(self.acknowledged) - (rng.random() < 0.1))}"
            life, name = self.life, None
            with suppress(KilledError, BufferFullError, InvalidRequestError):
                name = await self._post(key)
            # A rollout worker that is dead has answered nothing.
            if name is not None and not life.dead:
                assert self.acknowledged.setdefault(key, name) == name
            await asyncio.sleep(rng.random() / 4)

    async def _post(self, key: str) -> str | None:
        if self.buffer is None or self.service.run_state.live_version < 0:
            return None
        sample = {
            "tokens": [1, 2],
            "response_length": 1,
            "rollout_log_probs": [-1.0],
            "weight_versions": [{"version": self.service.run_state.live_version, "start": 0, "end": 1}],
            "reward": 1.0,
            "metadata": {"key": key},
        }
        size = self.config.rollout.n_samples_per_prompt
        # The first sample of each group is a trajectory of two segments.
        posted = [[sample, sample], *[sample] * (size - 1)]
        return await self.buffer.add(posted, lookup=lambda name: [], claim=lambda name: None, key=key)

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        rollout = self.config.rollout
        args: Any = SimpleNamespace(
            rollout_batch_size=rollout.rollout_batch_size,
            max_weight_staleness=rollout.max_weight_staleness,
            trajectories=self.buffer,
        )
        return await external_rollout.generate_rollout(args, rollout_id, source)

    async def _prepare(self, rollout_id: int, groups: list[Group]) -> None:
        self.trained_keys |= {group.feed_index: sample.metadata["key"] for group in groups for sample in group}
