"""Fully asynchronous RL post-training: the algorithm.

             ┌──────────────────── recycled prompts (first in line) ────────────────────┐
             ▼                                                                          │
    data ─► feed ─► generate ─► reward ─► filter ─► window ─► queue ─► staleness gate ─► step
             ▲                                                                          │
             └──────── slots freed when the weights are live ◄──── publish ◄────────────┘

    loop      file        consumes              waits for                          unblocked by
    feed      produce.py  the data source       a place in flight, a slot, room    a group that ends, a publish, a drain
    group     produce.py  one admitted group    the engines, the reward            the engines, the reward
    train     here        the queue             a full batch of fresh groups       the window releasing groups
    publish   publish.py  staged weights        the engines to pause and resume    the engines
    repair    repair.py   engines out of line   their signs of life, their starts  the engines, the router
    watch     watch.py    -                     nothing                            -
    feedback  feedback.py -                     the engines' loads (if asked for)  the engines

Training is the one finite clock. The others run until it ends; one that returns on its own is an error. Every group is
in exactly one state of `scheduling/ledger.py`, and every state change is an event.

Three cadences share this file, and differ in when a rollout starts and when its weights are published:

    train.py                      generate, train, publish, in turns                          staleness 0
    train_async.py, batch         the next batch is generated while this one trains           staleness 1
    train_async.py, fully async   a persistent producer fills the queue; publishes overlap    at most the bound
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from miles_async.config.derived import checkpoint_due
from miles_async.config.schema import RunConfig
from miles_async.events import EventSink, TrainerPhaseChanged
from miles_async.pipeline.collect import BatchCollector
from miles_async.pipeline.evaluate import EvalSet, Evaluator, Scores
from miles_async.pipeline.feedback import follow_engines
from miles_async.pipeline.monitor import RunMonitor
from miles_async.pipeline.produce import Producer
from miles_async.pipeline.progress import progress_of
from miles_async.pipeline.publish import Publisher
from miles_async.pipeline.recycle import Recycler
from miles_async.pipeline.repair import Repair
from miles_async.pipeline.run_state import RunState
from miles_async.pipeline.sample_display import SampleDisplay
from miles_async.pipeline.source import RolloutSource
from miles_async.pipeline.tasks import TaskSupervisor
from miles_async.pipeline.training import Training
from miles_async.ports import (
    Clock,
    DataSource,
    DeadLetters,
    Fleet,
    Generator,
    Learner,
    Rewarder,
    WeightChannel,
)
from miles_async.scheduling.admission import Admission
from miles_async.scheduling.bounds import Bounds
from miles_async.scheduling.concurrency import AdaptiveConcurrency
from miles_async.scheduling.head import HeadAction, HeadPolicy
from miles_async.scheduling.staleness import StalenessGate
from miles_async.types import Group, Verdict

RolloutFunction = Callable[[int, RolloutSource], Awaitable[list[Group]]]
"""`(rollout_id, source) -> groups`: a user's or a shipped rollout function, its arguments bound."""
EvaluationFunction = Callable[[int, RolloutSource], Awaitable[Scores]]
"""The same for `--eval-function-path`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """The outside world of one run."""

    clock: Clock
    events: EventSink
    data: DataSource
    generator: Generator
    evaluator: Generator
    """Like `generator`, but greedy."""
    rewarder: Rewarder
    learner: Learner
    channel: WeightChannel
    fleet: Fleet
    dead_letters: DeadLetters
    keep: Callable[[Group], bool | Verdict]
    """The dynamic sampling filter's verdict on a finished group."""
    problems: Sequence[Group]
    """Held-out problems, one sample each; none means that they are not evaluated."""
    eval_sets: Sequence[EvalSet] = ()
    """Further data sets to evaluate on."""
    evaluate: EvaluationFunction | None = None
    """A user's own evaluation; None evaluates all of the above."""


class Service:
    """One run: `await run(rollout)` returns when `num_rollout` batches are trained, published and evaluated."""

    def __init__(
        self, config: RunConfig, bounds: Bounds, ports: Ports, *, synchronous: bool, first_rollout: int = 0
    ) -> None:
        """`first_rollout` is above 0 where the run resumes from a checkpoint."""
        self._config = config
        self._ports = ports
        self._take_turns = synchronous
        self._first_rollout = first_rollout
        self._tasks: TaskSupervisor
        self._stopping = asyncio.Event()
        self._evaluating = asyncio.Lock()
        self._checkpoint_written: asyncio.Task[None] | None = None
        """The newest checkpoint, while it is written and after."""
        self._trained: list[Group] = []
        """Groups in the weights since the last staged version."""
        self.run_state = RunState(ports.clock, ports.events)
        gate = StalenessGate(config.rollout.max_weight_staleness)
        self._training = Training(self.run_state, ports.learner, ports.dead_letters, gate, config)
        self._adaptive = AdaptiveConcurrency(bounds.generation_batch) if config.engine.adaptive_concurrency else None
        recycler = Recycler(self.run_state, ports.data, ports.dead_letters, config.rollout.max_attempts)
        self._producer = Producer(
            run_state=self.run_state,
            data=ports.data,
            generator=ports.generator,
            rewarder=ports.rewarder,
            keep=ports.keep,
            recycler=recycler,
            window_size=bounds.window,
            head_policy=HeadPolicy(
                config.rollout.head_deadline_seconds, HeadAction(config.rollout.head_deadline_action)
            ),
            queue_capacity=config.rollout.queue_capacity,
            partial_rollout=config.rollout.partial_rollout,
            serving=self._serving,
            shown=SampleDisplay(ports.events, config.observability.sample_interval_seconds),
        )
        self._collector = BatchCollector(
            run_state=self.run_state,
            producer=self._producer,
            recycler=recycler,
            gate=gate,
            stream_admission=Admission(
                max_in_flight=bounds.generation_batch, room=bounds.room, slots=bounds.slots, adaptive=self._adaptive
            ),
            tasks=lambda: self._tasks,
        )
        self._devices = asyncio.Lock()
        """Colocated, held by the learner while it has them, and by an engine that is being started on them."""
        self._publisher = Publisher(
            run_state=self.run_state,
            channel=ports.channel,
            fleet=ports.fleet,
            pause_mode=config.weights.pause_generation_mode,
            queue_depth=lambda: len(self._producer.queue),
            on_live=self._collector.sweep,
        )
        self._repair = Repair(
            run_state=self.run_state,
            fleet=ports.fleet,
            publisher=self._publisher,
            tasks=lambda: self._tasks,
            interval_seconds=config.engine.engine_health_interval_seconds,
            devices=self._devices if config.cluster.colocate else nullcontext(),
        )
        self._monitor = RunMonitor(
            run_state=self.run_state,
            producer=self._producer,
            drain=self._collector,
            generator=ports.generator,
            warn_seconds=config.observability.no_progress_warn_seconds,
            abort_seconds=config.observability.no_progress_abort_seconds,
        )
        held_out = EvalSet(name="held_out", problems=ports.problems, generator=ports.evaluator)
        self._evaluator = Evaluator(self.run_state, ports.rewarder, [held_out, *ports.eval_sets], self._serving)
        self._source = RolloutSource(ports.data, self._collector, self._evaluator)

    def stop(self) -> None:
        """End the run after the step that is being taken; what was trained is still published."""
        self._stopping.set()
        self.run_state.changed.notify()

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    async def remove_engine(self, name: str) -> None:
        """What it holds is generated elsewhere."""
        await self._publisher.leave(name)

    async def run(self, rollout: RolloutFunction) -> None:
        """Raises UserError, Fatal, or whatever a user's function raised; everything started is ended first."""
        async with TaskSupervisor() as self._tasks:
            self._tasks.forever("watch", self._monitor.run())
            if self._adaptive is not None:
                self._tasks.forever("feedback", follow_engines(self.run_state, self._ports.fleet, self._adaptive))
            await self._publisher.stage(0, [])
            if self._config.cluster.colocate:
                # Both have started on the same devices; the engines come first.
                await self._ports.learner.offload()
            self._tasks.forever("repair", self._repair.run())
            await self._publisher.publish()
            await self._evaluate(self._first_rollout - 1)
            await self._train(rollout)
            await self._producer.close()
            if not self.stopped:
                await self._evaluate(self._config.rollout.num_rollout - 1)

    def _serving(self) -> bool:
        return bool(self._ports.fleet.routed())

    async def _train(self, rollout: RolloutFunction) -> None:
        """The finite clock: one batch, one step, one version (every `update_weights_interval` batches)."""
        last = self._config.rollout.num_rollout - 1
        interval = self._config.weights.update_weights_interval
        first = self._first_rollout
        batch = self._tasks.spawn(f"rollout-{first}", self._next_batch(rollout, first))
        for rollout_id in range(first, last + 1):
            self._turn_to("batch")
            groups = await self._unless_stopped(batch)
            if groups is None:
                break
            continuous = self._producer.is_open
            prefetch = not continuous and not self._take_turns
            if prefetch:
                # Nothing is in flight between two batches: the version goes live before the next one starts.
                self._turn_to("publish")
                await self._publisher.publish()
                self._turn_to("batch")
            groups = await self._only_fresh(rollout_id, groups)
            if prefetch and rollout_id < last:
                batch = self._tasks.spawn(f"rollout-{rollout_id + 1}", self._next_batch(rollout, rollout_id + 1))
            await self._devices_to_learner()
            self._turn_to("step")
            if await self._training.step(rollout_id, groups):
                self._trained += groups
            due = (rollout_id + 1) % interval == 0 or rollout_id == last
            # After steps that were not finite alone there are no new weights, and so no new version.
            if due and self._trained:
                await self._stage()
                if continuous:
                    self._publisher.start(self._tasks)
            if checkpoint_due(self._config, rollout_id):
                self._turn_to("save")
                await self._checkpoint(rollout_id)
            if self._take_turns:
                self._turn_to("publish")
                await self._devices_to_engines()
                await self._publisher.publish()
            if self._evaluates_after(rollout_id):
                evaluation = self._evaluate(rollout_id)
                if self._take_turns:
                    self._turn_to("evaluate")
                    await evaluation
                else:
                    # On the same engines, while training goes on: its samples may span several versions.
                    self._tasks.spawn(f"evaluate-{rollout_id}", evaluation)
            if not prefetch and rollout_id < last:
                batch = self._tasks.spawn(f"rollout-{rollout_id + 1}", self._next_batch(rollout, rollout_id + 1))
        if self._trained:
            # The run was stopped between two versions.
            await self._stage()
        self._turn_to("publish")
        await self._publisher.idle()
        await self._publisher.publish()
        if self._checkpoint_written is not None:
            self._turn_to("save")
            await self._checkpoint_written
        self._turn_to("evaluate")

    async def _stage(self) -> None:
        """What was trained since the last version becomes a new one."""
        self._turn_to("publish")
        await self._publisher.stage(self.run_state.trainer_version + 1, self._trained)
        self._trained = []

    async def _checkpoint(self, rollout_id: int) -> None:
        """Copied between two steps, written while the next ones are taken unless `async_save` is off; one at a time."""
        if self._checkpoint_written is not None:
            await self._checkpoint_written
        progress = progress_of(rollout_id, self.run_state, self._ports.data)
        await self._ports.learner.copy_state(rollout_id)
        writing = self._ports.learner.write_state(rollout_id, progress)
        self._checkpoint_written = self._tasks.spawn(f"checkpoint-{rollout_id}", writing)
        if not self._config.learner.async_save:
            await self._checkpoint_written
        self.run_state.progressed()

    def _turn_to(self, what: str) -> None:
        self._ports.events.emit(TrainerPhaseChanged(time=self._ports.clock.now(), to=what))

    async def _devices_to_learner(self) -> None:
        """Colocated, the engines leave their memory to the learner for its step; nothing is generated meanwhile."""
        if self._config.cluster.colocate:
            await self._devices.acquire()
            await self._ports.fleet.offload()
            await self._ports.learner.onload()

    async def _devices_to_engines(self) -> None:
        """The other way round, before a publish: what is staged is beside the devices."""
        if self._config.cluster.colocate:
            await self._ports.learner.offload()
            await self._ports.fleet.onload()
            self._devices.release()

    def _evaluates_after(self, rollout_id: int) -> bool:
        """After the last rollout it is done anyway, once everything is published."""
        interval = self._config.rollout.eval_interval
        return (
            interval is not None
            and (rollout_id + 1) % interval == 0
            and rollout_id < self._config.rollout.num_rollout - 1
        )

    async def _evaluate(self, rollout_id: int) -> None:
        """One at a time; waits for an earlier one that still runs."""
        async with self._evaluating:
            started = self._ports.clock.now()
            if self._ports.evaluate is not None:
                scores = await self._ports.evaluate(rollout_id, self._source)
            else:
                scores = await self._evaluator.evaluate(rollout_id)
            self._evaluator.report(rollout_id, scores, self._ports.clock.now() - started)

    async def _only_fresh(self, rollout_id: int, groups: list[Group]) -> list[Group]:
        """The batch with what grew too old since its drain recycled and replaced: topped up, never shrunk."""
        while missing := len(groups) - len(fresh := self._collector.refuse_stale(groups)):
            if self._producer.is_open:
                groups = fresh + await self._collector.stream(rollout_id, missing)
            else:
                groups = fresh + await self._collector.batch(rollout_id, missing, missing)
        return groups

    async def _next_batch(self, rollout: RolloutFunction, rollout_id: int) -> list[Group]:
        before = self.run_state.leased
        groups = await rollout(rollout_id, self._source)
        self.run_state.take_over(groups, before)
        return groups

    async def _unless_stopped(self, batch: asyncio.Task[list[Group]]) -> list[Group] | None:
        """The batch, or None when the run is asked to stop first."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([batch, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        return None if self.stopped else await batch
