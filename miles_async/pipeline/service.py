"""Fully asynchronous RL post-training: the algorithm.

             ┌──────────────────── recycled prompts (first in line) ────────────────────┐
             ▼                                                                          │
    data ─► feed ─► generate ─► reward ─► filter ─► window ─► queue ─► staleness gate ─► step
             ▲                                                                          │
             └──────── slots freed when the weights are live ◄──── publish ◄────────────┘

    loop      file        consumes              waits for                          unblocked by
    feed      produce.py  the data source       a limit of admission               an ended group, a publish, a batch
    group     attempt.py  one admitted group    the engines, the reward            the engines, the reward
    train     here        the queue             a full batch of fresh groups       the window, which releases groups
    publish   publish.py  staged weights        the engines to pause and resume    the engines
    repair    repair.py   failed engines        health checks, engine starts       the engines, the router
    monitor   monitor.py  -                     nothing                            -
    work      monitor.py  -                     the learner's ranks                the learner's ranks
    load      monitor.py  -                     the engines' loads                 the engines

Training is finite; the other loops run until it ends, and a loop that returns earlier is an error. Every group is in
exactly one state of `scheduling/ledger.py`, and every change of state is an event. The journal stores all changes, and
`restore.py` continues the run of a rollout worker that was lost.

The three schedules share `Service._train`. They differ in when a batch is collected and when weights are published:

    synchronous    generate, train, publish, one after the other                   staleness 0
    one_step_off   the next batch is generated while the current batch trains      staleness 1
    fully_async    a persistent producer fills the queue, and publishes overlap    limited by admission and the gate

A rollout function may have a worker that generates between its calls (`Ports.keeps_groups`). It takes the place of
the producer under every schedule: prompts are taken, held and returned through `held_prompts.py`.

`Service.stop` drains the run, in the same way under all schedules. No group is admitted any more. The groups in flight,
the current step and its checkpoint may end for `--drain-seconds` together. What has not ended then is abandoned: its
groups and prompts are in the store, from which a restored run continues. The last weights are not published, because
the engines are about to end.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from miles_async.config.schema import RunConfig
from miles_async.events import RunDrained, TrainerPhaseChanged
from miles_async.pipeline.evaluate import DueEvaluations
from miles_async.pipeline.parts import Parts
from miles_async.pipeline.restore import DueVersion, progress_values
from miles_async.pipeline.run_ports import Ports
from miles_async.scheduling.bounds import Bounds, Schedule
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import StoredRun
from miles_async.types import Group

T = TypeVar("T")


class Service:
    """One run: `run` returns when `num_rollout` batches are trained, published and evaluated.

    Example::

        service = Service(config, bounds_of(config, entry), ports, schedule=schedule_of(config, entry))
        await service.run()
    """

    def __init__(
        self,
        config: RunConfig,
        bounds: Bounds,
        ports: Ports,
        *,
        schedule: Schedule,
        first_rollout: int = 0,
        stored: StoredRun | None = None,
    ) -> None:
        """`first_rollout` is above 0 if the run resumes from a checkpoint.

        `stored` is the state that a lost rollout worker left in the store; this service continues from it.
        """
        if ports.functions.rollout is None and schedule is not Schedule.FULLY_ASYNC:
            raise ValueError(f"schedule {schedule} needs a rollout function: set RunFunctions.rollout")
        self._config = config
        self._ports = ports
        self._schedule = schedule
        self._first_rollout = first_rollout
        self._next_rollout = first_rollout
        """The next batch to train."""
        self._evaluated = -2
        """The rollout after which the last evaluation ended; -1 is the evaluation before training."""
        self._stored = stored
        self._stopping = asyncio.Event()
        self._stopped_at = 0.0
        """When `stop` was called first (`Clock.monotonic`)."""
        self._step_groups: list[Group] = []
        """Groups of the training step in progress."""
        self._interrupted = 0
        """Groups in flight that a drain aborted."""
        self._trained: list[Group] = []
        """Groups trained since the last staged version."""
        parts = Parts(config, bounds, ports, schedule)
        self._tasks = parts.tasks
        self.run_state = parts.run_state
        self.lifecycle = parts.lifecycle
        self.held = parts.held
        self._admission = parts.admission
        self._producer = parts.producer
        self._collector = parts.collector
        self._source = parts.source
        self._training = parts.training
        self._devices = parts.devices
        self._publisher = parts.publisher
        self._repair = parts.repair
        self._watchers = parts.watchers
        self._checkpointer = parts.checkpointer
        self._evaluator = parts.evaluator
        self._restorer = parts.restorer
        self._evaluations = DueEvaluations(self.run_state, self._tasks, self._evaluate, self._evaluator.may_generate)

    def stop(self) -> None:
        """Drain the run: `run` returns when what is in progress has ended, after `drain_seconds` at the latest."""
        if not self.stopped:
            self._stopped_at = self._ports.clock.monotonic()
            self._producer.close()
            self._stopping.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    async def remove_engine(self, name: str) -> None:
        """Remove an engine from the run; its groups are generated on other engines."""
        await self._publisher.leave(name)

    async def run(self) -> None:
        """Run to the end. Raises UserError, FatalError or an error of a user's function, after ending all tasks."""
        try:
            await self._run()
        finally:
            await self._ports.journal.flush()

    async def _run(self) -> None:
        async with self._tasks:
            self._tasks.forever("journal", self._ports.journal.run())
            for name, watch in self._watchers.items():
                self._tasks.forever(name, watch())
            try:
                async with asyncio.timeout(None) as limit:
                    drain = self._tasks.spawn("drain", self._limit_drain(limit))
                    await self._work()
            except TimeoutError:
                # A timeout of a port is an error of the run.
                if not limit.expired():
                    raise
            drain.cancel()
            if self.stopped:
                self._report_drain()

    async def _work(self) -> None:
        """Train and evaluate to the end, or until the run is drained."""
        # Until the state is restored, the stored values must stay as they are.
        publishes = self._first_versions() if self._stored is None else await self._restore(self._stored)
        self._ports.journal.progress = self._progress
        await self._devices.begin()
        for number, version in enumerate(publishes):
            await self._publisher.stage(version.number, version.trained, version.adapter)
            if not number:
                await self._devices.to_engines()
                self._tasks.forever("repair", self._repair.run())
            await self._publisher.publish()
        await self._catch_up(self._next_rollout - 1)
        if self._schedule is Schedule.FULLY_ASYNC and self._ports.keeps_groups is False:
            self._producer.start(self._admission)
        await self._train()
        if self.stopped:
            await self.run_state.changed.until(lambda: not self.lifecycle.ledger.in_flight)
        else:
            await self._producer.stop()
            await self._evaluate_now(self._config.rollout.num_rollout - 1)

    async def _limit_drain(self, limit: asyncio.Timeout) -> None:
        """Let `limit` expire `drain_seconds` after `stop` was called."""
        await self._stopping.wait()
        limit.reschedule(asyncio.get_running_loop().time() + self._config.cluster.drain_seconds)

    def _report_drain(self) -> None:
        counts, saved = self.lifecycle.ledger.counts, self._checkpointer.last_saved
        self._ports.journal.emit(
            RunDrained(
                time=self._ports.clock.time(),
                seconds=self._ports.clock.monotonic() - self._stopped_at,
                finished=self._producer.finished_since_close,
                interrupted=self._interrupted + self.lifecycle.ledger.in_flight,
                abandoned=len(self._step_groups),
                kept=counts[GroupState.FINISHED] + counts[GroupState.QUEUED] + counts[GroupState.LEASED],
                unsaved=self._next_rollout - (self._first_rollout if saved is None else saved + 1),
            )
        )

    def _first_versions(self) -> list[DueVersion]:
        """The first version of each adapter."""
        names = self._config.data.adapter_weights
        for number, name in enumerate(names):
            self.run_state.announce(number, name)
        return [DueVersion(number, name) for number, name in enumerate(names)]

    async def _restore(self, stored: StoredRun) -> list[DueVersion]:
        """Continue the run of a lost rollout worker. Returns the versions to publish."""
        restored = await self._restorer.restore(stored, self._first_rollout)
        self._next_rollout, self._evaluated = restored.next_rollout, restored.evaluated
        self._checkpointer.last_rollout = self._checkpointer.last_saved = restored.saved
        return restored.publishes

    async def _catch_up(self, rollout_id: int) -> None:
        """Evaluate and save after `rollout_id`, which is -1 before training, if it is due and still missing.

        This is the evaluation before training, or what a lost rollout worker could not do any more.
        """
        before_training = self._first_rollout - 1
        unsaved = rollout_id > before_training and self._checkpointer.last_rollout != rollout_id
        if unsaved and self._config.checkpoint_due(rollout_id):
            await self._save(rollout_id)
        missed = [
            rollout
            for rollout in range(max(self._evaluated + 1, before_training), rollout_id + 1)
            if rollout == before_training or self._config.evaluation_due(rollout)
        ]
        if missed:
            self._enter_phase("evaluate")
            await self._evaluate_now(missed[-1])

    async def _train(self) -> None:
        """Train batch after batch; every `update_weights_interval` batches become one weight version."""
        schedule, last = self._schedule, self._config.rollout.num_rollout - 1
        # The last batch has no next one.
        packs = self._ports.packs_ahead and len(self.run_state.lineages) == 1
        packs_until = last if packs and schedule is Schedule.FULLY_ASYNC else 0
        if self._next_rollout > last:  # the run was restored after its last step
            await self._finish()
            return
        batch = self._start_batch(self._next_rollout)
        for rollout_id in range(self._next_rollout, last + 1):
            self._enter_phase("batch")
            groups = await self._unless_stopped(batch)
            if groups is None:
                break
            if schedule is Schedule.ONE_STEP_OFF:
                # No group is in flight between two batches, so the version goes live before the next batch starts.
                self._enter_phase("publish")
                await self._publisher.publish()
                self._enter_phase("batch")
            groups = await self._replace_stale(rollout_id, groups)
            if groups is None:
                break
            if schedule is Schedule.ONE_STEP_OFF and rollout_id < last:
                batch = self._start_batch(rollout_id + 1)
            await self._ports.functions.prepare(rollout_id, groups)
            if self.stopped:
                break
            await self._devices.to_learner()
            self._enter_phase("step")
            self._step_groups = groups
            if await self._training.step(rollout_id, groups, self._pack_next if rollout_id < packs_until else None):
                self._trained += groups
            self._step_groups = []
            self._next_rollout = rollout_id + 1
            if self.stopped:
                break
            # Without a finite step since the last version, the weights are unchanged and no version is due.
            if self._config.publish_due(rollout_id) and self._trained:
                await self._stage()
                if schedule is Schedule.FULLY_ASYNC:
                    self._publisher.start()
            if self._config.checkpoint_due(rollout_id):
                await self._save(rollout_id)
            if schedule is Schedule.SYNCHRONOUS:
                self._enter_phase("publish")
                await self._devices.to_engines()
                await self._publisher.publish()
            if self._config.evaluation_due(rollout_id):
                await self._evaluate_between_steps(rollout_id)
            if schedule is not Schedule.ONE_STEP_OFF and rollout_id < last:
                batch = self._start_batch(rollout_id + 1)
        if self.stopped:
            batch.cancel()
            await self._save_before_end()
        else:
            await self._finish()

    async def _finish(self) -> None:
        """Make the last version live and wait for the last checkpoint."""
        self._enter_phase("publish")
        await self._publisher.idle()
        await self._publisher.publish()
        await self._checkpoint_written()
        self._enter_phase("evaluate")

    async def _checkpoint_written(self) -> None:
        """Return when no checkpoint is being written."""
        if self._checkpointer.newest is not None:
            self._enter_phase("save")
            await self._checkpointer.newest

    async def _save_before_end(self) -> None:
        """Save the state after the last step if it is not saved yet, and wait for the last checkpoint."""
        learner, last_trained = self._config.learner, self._next_rollout - 1
        saves = learner.save is not None or learner.save_hf is not None
        trained_any = last_trained >= self._first_rollout
        if saves and trained_any and self._checkpointer.last_rollout != last_trained:
            if self._config.cluster.colocate:
                # The engines must be idle before the learner gets the devices back.
                self._interrupted = self.lifecycle.ledger.in_flight
                await self._producer.abort()
            await self._devices.to_learner()
            await self._save(last_trained)
        await self._checkpoint_written()

    async def _save(self, rollout_id: int) -> None:
        self._enter_phase("save")
        await self._checkpointer.write(rollout_id)

    def _start_batch(self, rollout_id: int) -> asyncio.Task[list[Group]]:
        return self._tasks.spawn(f"rollout-{rollout_id}", self._collect_batch(rollout_id))

    async def _collect_batch(self, rollout_id: int) -> list[Group]:
        """The groups to train next, from the queue or from the rollout function."""
        self._ports.on_rollout(rollout_id)
        size = self._config.rollout.rollout_batch_size
        if self._ports.functions.rollout is None:
            return await self._collector.collect(rollout_id, size)
        return await self._call_function(rollout_id, size)

    def _pack_next(self) -> asyncio.Task[None]:
        """Let the learner pack the next batch as soon as the queue holds it."""

        async def pack() -> None:
            self._ports.learner.pack(await self._collector.upcoming(self._config.rollout.rollout_batch_size))

        return self._tasks.spawn("pack", pack())

    async def _call_function(self, rollout_id: int, size: int) -> list[Group]:
        assert self._ports.functions.rollout is not None
        leased_before = self.lifecycle.groups_in(GroupState.LEASED)
        groups = await self._ports.functions.rollout(rollout_id, self._source, size)
        self._ports.data.metadata_changed()
        self.held.reconcile(groups, leased_before)
        return groups

    async def _replace_stale(self, rollout_id: int, groups: list[Group]) -> list[Group] | None:
        """Recycle the groups that became too stale since they were collected, and collect as many fresh ones.

        Returns None if `stop` is called before.
        """
        while missing := len(groups) - len(fresh := self._collector.recycle_stale(groups)):
            if self._ports.functions.rollout is not None and self._ports.keeps_groups is not False:
                replacements = self._call_function(rollout_id, missing)
            elif self._schedule is Schedule.FULLY_ASYNC:
                replacements = self._collector.collect(rollout_id, missing, self.run_state.adapter_of(groups[0]))
            else:
                replacements = self._collector.generate(rollout_id, missing, missing)
            collected = await self._unless_stopped(self._tasks.spawn("replacements", replacements))
            if collected is None:
                return None
            groups = fresh + collected
        return groups

    async def _unless_stopped(self, task: asyncio.Task[T]) -> T | None:
        """The result of `task`. If `stop` is called before, `task` is cancelled, and the result is None."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not self.stopped:
            return await task
        task.cancel()
        await asyncio.wait([task])
        return None

    async def _stage(self) -> None:
        self._enter_phase("publish")
        version, adapter = self.run_state.announced_version + 1, self.run_state.adapter_of(self._trained[0])
        await self._publisher.stage(version, self._trained, adapter)
        self._trained = []

    async def _evaluate_between_steps(self, rollout_id: int) -> None:
        """Evaluate now, or while training continues: the samples may then span several versions."""
        if self._schedule is Schedule.SYNCHRONOUS:
            self._enter_phase("evaluate")
            await self._evaluate_now(rollout_id)
        else:
            self._evaluations.add(rollout_id)

    async def _evaluate_now(self, rollout_id: int) -> None:
        """Evaluate. Returns when this evaluation and an earlier one have ended, or when `stop` is called."""
        await self._unless_stopped(self._evaluations.add(rollout_id))

    async def _evaluate(self, rollout_id: int) -> None:
        clock, run_state = self._ports.clock, self.run_state
        started, first_version = clock.monotonic(), run_state.live_version
        evaluate = self._ports.functions.evaluate
        with run_state.evaluating(self._config.rollout.generate_timeout_seconds):
            if evaluate is not None:
                scores = await evaluate(rollout_id, self._source)
            else:
                scores = await self._evaluator.evaluate(rollout_id)
        live_versions = first_version, run_state.live_version
        self._evaluator.report(rollout_id, scores, clock.monotonic() - started, live_versions)
        self._evaluated = rollout_id

    def _progress(self) -> dict[str, Any]:
        return progress_values(
            self.run_state,
            self.lifecycle,
            self._ports.data,
            next_rollout=self._next_rollout,
            evaluated=self._evaluated,
            saved=self._checkpointer.last_saved,
        )

    def _enter_phase(self, phase: str) -> None:
        self.run_state.waits_for_groups = phase in ("batch", "evaluate")
        self._ports.journal.emit(TrainerPhaseChanged(time=self._ports.clock.time(), to=phase))
