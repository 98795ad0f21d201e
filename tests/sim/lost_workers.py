"""A simulated run whose rollout worker is killed again and again; everything outside of it goes on."""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from miles_async.events import Event
from miles_async.pipeline.journal import EventOutbox
from miles_async.pipeline.run_ports import Ports
from miles_async.stored_run import Changes, StoredGroup, StoredRun
from miles_async.types import Group, LearnerProgress, StepReport
from tests.sim.engines import Engines
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Trainer, World

START_SECONDS = 5.0
"""Until another rollout worker has started."""


class KilledError(BaseException):
    """Raised inside a rollout worker that is dead, so that nothing in it goes on. No handler catches it."""


class MemoryStore:
    """Keeps what was written, as a database would: nothing in it is shared with the rollout worker."""

    def __init__(self) -> None:
        self._number = 0
        self._groups: dict[int, tuple[int, StoredGroup]] = {}
        self._owed: dict[str, Group] = {}
        self._progress: dict[str, Any] = {}
        self._events: list[tuple[int, Sequence[Event]]] = []
        self.largest = 0
        """The most groups and prompts that were stored at once."""

    async def write(self, changes: Changes) -> None:
        assert changes.number > self._number
        self._number = changes.number
        for sequence in changes.ended:
            self._groups.pop(sequence, None)
        for sequence, change in changes.groups.items():
            _, before = self._groups.get(sequence, (0, None))
            content = change.content if change.content is not None or before is None else before.content
            group = StoredGroup(
                sequence=sequence,
                feed_index=change.feed_index,
                attempt=change.attempt,
                state=change.state,
                adopted=change.adopted,
                content=copy.deepcopy(content),
            )
            self._groups[sequence] = change.order, group
        for name in changes.settled:
            self._owed.pop(name, None)
        self._owed |= {name: Group.from_prompt_dict(copy.deepcopy(prompt)) for name, prompt in changes.owed.items()}
        self._progress |= copy.deepcopy(changes.progress)
        self._events = [entry for entry in self._events if entry[0] > changes.delivered]
        self._events.append((changes.number, list(changes.events)))
        self.largest = max(self.largest, len(self._groups) + len(self._owed))

    async def read(self) -> StoredRun | None:
        if not self._number:
            return None
        groups = [copy.deepcopy(group) for _, group in sorted(self._groups.values(), key=lambda entry: entry[0])]
        return StoredRun(
            number=self._number,
            groups=groups,
            owed=[copy.deepcopy(group) for group in self._owed.values()],
            progress=copy.deepcopy(self._progress),
            events=list(self._events),
        )


@dataclass
class LastingTrainer(Trainer):
    """A learner that ends what it was asked for, whether or not the rollout worker still waits for it."""

    last: LearnerProgress = field(
        default_factory=lambda: LearnerProgress(rollout=None, groups=(), report=None, version=0, changed=False)
    )
    busy: set[asyncio.Task[Any]] = field(default_factory=set)

    async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
        return await self._to_the_end(self._train(rollout_id, list(groups)))

    async def _train(self, rollout_id: int, groups: list[Group]) -> StepReport:
        report = await super().train(rollout_id, groups)
        sequences = [group.sequence or 0 for group in groups]
        changed = self.last.changed or report.finite
        self.last = replace(self.last, rollout=rollout_id, groups=sequences, report=report, changed=changed)
        return report

    async def write_state(self, rollout_id: int, progress: Any) -> None:
        await self._to_the_end(super().write_state(rollout_id, progress))

    async def stage(self, version: int, seconds: float) -> None:
        await self._to_the_end(self._stage(version, seconds))

    async def _stage(self, version: int, seconds: float) -> None:
        await self.clock.sleep(seconds)
        self.last = replace(self.last, version=version, changed=False)

    async def progress(self) -> LearnerProgress:
        while self.busy:
            await asyncio.wait(self.busy)
        self.copied = None
        return self.last

    async def _to_the_end(self, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        self.busy.add(task)
        task.add_done_callback(self.busy.discard)
        return await asyncio.shield(task)


class LastingEngines(Engines):
    """Engines whose requests of a dead rollout worker are aborted when another one connects."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.learner: LastingTrainer

    async def stage(self, version: int) -> None:
        await self.learner.stage(version, self._model.stage_seconds)

    async def forget_requests(self) -> None:
        await self.abort()
        while self._pauses:
            self._go_on()
        self._left.clear()


@dataclass
class Life:
    """One rollout worker, which is killed at its `fatal_call`-th call of a port: before the call or after it."""

    fatal_call: int
    after: bool
    kill: Callable[[], None] = lambda: None
    calls: int = 0
    dead: bool = False

    def call(self, *, returns: bool) -> None:
        """Count a call that begins or returns. Raises KilledError if this life has ended."""
        if self.dead:
            raise KilledError
        self.calls += not returns
        if self.calls == self.fatal_call and returns is self.after:
            self.dead = True
            self.kill()
            raise KilledError

    def port(self, target: Any) -> Any:
        return _Port(target, self)


class _Port:
    """Passes calls on as long as the rollout worker lives."""

    def __init__(self, target: Any, life: Life) -> None:
        self._target = target
        self._life = life

    def __getattr__(self, name: str) -> Any:
        value, life = getattr(self._target, name), self._life
        if not callable(value) or name in ("monotonic", "time"):
            return value

        def plain(*arguments: Any, **keywords: Any) -> Any:
            life.call(returns=False)
            result = value(*arguments, **keywords)
            if inspect.isawaitable(result):
                return waiting(result)
            life.call(returns=True)
            return result

        async def waiting(result: Awaitable[Any]) -> Any:
            answer = await result
            life.call(returns=True)
            return answer

        return plain


@dataclass
class _LivingOutbox:
    """Passes events on as long as the rollout worker lives."""

    world: LostWorkers
    life: Life

    @property
    def received(self) -> int:
        return self.world.received

    def put(self, number: int, events: Sequence[Event]) -> None:
        self.life.call(returns=False)
        self.world.put(number, events)


@dataclass(kw_only=True)
class LostWorkers(World):
    """`kills` rollout workers are killed, each at a random call of a port."""

    kills: int = 3
    longest_life: int = 2000
    """The most calls of ports until a kill."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine_kind, self.trainer_kind = LastingEngines, LastingTrainer
        self.store = MemoryStore()
        self.lives = 0
        self.received = 0

    async def _serve(self, clock: VirtualClock, store: Any, stored: StoredRun | None) -> None:
        assert isinstance(self.fleet, LastingEngines)
        assert isinstance(self.trainer, LastingTrainer)
        self.fleet.learner = self.trainer
        rng = random.Random(f"kills {self.seed}")
        for _ in range(self.kills):
            self.life = Life(rng.randint(1, self.longest_life), rng.random() < 0.5)
            if await self._live(clock):
                return
            await clock.sleep(START_SECONDS)
            await self.fleet.forget_requests()
        self.life = Life(0, after=False)
        assert await self._live(clock)

    async def _live(self, clock: VirtualClock) -> bool:
        """Whether the run came to its end before the rollout worker was killed."""
        self.lives += 1
        stored = await self.store.read()
        for number, events in stored.events if stored is not None else ():
            self.put(number, events)
        worker = asyncio.ensure_future(super()._serve(clock, self.life.port(self.store), stored))
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

    @staticmethod
    def _cancel_soon(worker: asyncio.Future[None]) -> None:
        asyncio.get_running_loop().call_soon(worker.cancel)

    def _outbox(self) -> EventOutbox:
        return _LivingOutbox(self, self.life)

    def put(self, number: int, events: Sequence[Event]) -> None:
        """The driver takes each batch of events once."""
        if number > self.received:
            self.received = number
            for event in events:
                self.emit(event)

    def _ports(self, clock: VirtualClock) -> Ports:
        ports, port = super()._ports(clock), self.life.port
        return replace(
            ports,
            clock=port(ports.clock),
            data=port(ports.data),
            generator=port(ports.generator),
            evaluator=port(ports.evaluator),
            rewarder=port(ports.rewarder),
            learner=port(ports.learner),
            channel=port(ports.channel),
            fleet=port(ports.fleet),
            dead_letters=port(ports.dead_letters),
        )

    @property
    def unfinished(self) -> set[str]:
        """Prompts that the run still owes."""
        return {group.feed_index for group in self.service.run_state.live_groups} | self.returned
