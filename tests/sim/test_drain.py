"""A run that is stopped at any moment ends in limited time, and a run that continues from its store loses nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.events import GroupMoved, RunDrained, StepEnded, StepStarted
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.ledger import GroupState
from miles_async.stored_run import StoredRun
from miles_async.types import DropReason
from tests.configuration import run_config
from tests.sim.lost_workers import LastingEngines, LastingTrainer, MemoryStore
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import World

ROLLOUTS, BATCH = 12, 4
PROMPTS = ROLLOUTS * BATCH


class SavedTrainer(LastingTrainer):
    """A learner that comes back in the state after the last step that ended."""

    async def _to_the_end(self, work: Awaitable[Any]) -> Any:
        return await work


@dataclass(kw_only=True)
class DrainedWorld(World):
    """Is stopped after `stop_after` seconds. With `continues`, another rollout worker continues it from its store."""

    stop_after: float
    continues: bool = True
    store: MemoryStore = field(default_factory=MemoryStore)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine_kind, self.trainer_kind = LastingEngines, SavedTrainer

    async def _serve(self, clock: VirtualClock, store: Any, stored: StoredRun | None) -> None:
        assert isinstance(self.fleet, LastingEngines)
        assert isinstance(self.trainer, LastingTrainer)
        self.fleet.learner = self.trainer.ranks = self.trainer
        self.fleet.stored_version = lambda: self.store.announced_version
        stop = asyncio.get_running_loop().call_at(self.stop_after, lambda: self.service.stop())
        await super()._serve(clock, self.store, None)
        stop.cancel()
        self.drained_at = clock.monotonic()
        left = await self.store.read()
        assert left is not None
        self.left = left
        self.taken = {f"sample_0_{number}" for number in range(self.feed._next)}
        self.trained_before = Counter(chain.from_iterable(self.trainer.batches))
        if self.continues and len(self.trainer.batches) < ROLLOUTS:
            await self.fleet.forget_requests()
            await super()._serve(clock, self.store, left)

    @property
    def drained(self) -> RunDrained:
        [event] = self.trace.of(RunDrained)
        assert isinstance(event, RunDrained)
        return event


def config(**settings: Any) -> RunConfig:
    sizes: dict[str, Any] = {"rollout_batch_size": BATCH, "num_rollout": ROLLOUTS, "n_samples_per_prompt": 2}
    return run_config(**sizes | {"max_weight_staleness": 3} | settings)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("seed", range(15))
def test_a_run_that_is_stopped_at_any_moment_ends_in_time_and_loses_nothing(seed: int, schedule: Schedule) -> None:
    draw = random.Random(seed)
    drain_seconds = draw.choice([0.0, 1.0, 10.0, 100.0])
    world = DrainedWorld(
        config=config(drain_seconds=drain_seconds, save="anywhere", save_interval=draw.choice([1, 4])),
        schedule=schedule,
        prompts=PROMPTS,
        train_seconds=draw.choice([0.5, 5.0, 30.0]),
        save_seconds=draw.choice([0.5, 20.0]),
        reward_seconds=draw.choice([0.0, 3.0]),
        stop_after=draw.uniform(0.0, 60.0),
        seed=seed,
    ).run()
    assert world.audit.violations == []
    prompts = {f"sample_0_{number}" for number in range(PROMPTS)}
    assert Counter(chain.from_iterable(world.trainer.batches)) == Counter(prompts), "each prompt is trained once"
    if not world.trace.of(RunDrained):
        return  # the run had ended before
    assert world.drained_at - world.stop_after <= drain_seconds + 1e-6
    finished = {group.feed_index for group in world.left.groups if group.content is not None}
    assert world.taken == set(world.trained_before) | {group.feed_index for group in world.left.prompts} | finished
    untrained = [
        group
        for group in world.left.groups
        if group.content is not None and group.state not in (GroupState.TRAINED, GroupState.PUBLISHED)
    ]
    assert world.drained.kept == len(untrained)
    dropped = Counter(event.reason for event in world.trace.of(GroupMoved) if event.after == "dropped")
    assert dropped[DropReason.WORKER_LOST] == world.drained.interrupted, "no other group is generated again"


def drained(
    stop_after: float,
    schedule: Schedule = Schedule.FULLY_ASYNC,
    *,
    train_seconds: float = 2.0,
    save_seconds: float = 1.0,
    **settings: Any,
) -> DrainedWorld:
    """A run whose groups take 4 seconds."""
    return DrainedWorld(
        config=config(**settings),
        schedule=schedule,
        latency=lambda group, rng: 4.0,
        train_seconds=train_seconds,
        save_seconds=save_seconds,
        stop_after=stop_after,
        continues=False,
    ).run()


@pytest.mark.parametrize("schedule", list(Schedule))
def test_groups_in_flight_finish_and_no_group_is_admitted(schedule: Schedule) -> None:
    world = drained(1.0, schedule)
    assert world.drained.finished == world.bounds.generation_batch == len(world.taken)
    assert (world.drained.interrupted, world.drained.kept) == (0, len(world.taken))
    assert world.drained.seconds == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_groups_that_take_longer_than_the_drain_are_interrupted(schedule: Schedule) -> None:
    world = drained(1.0, schedule, drain_seconds=1.5)
    assert (world.drained.finished, world.drained.interrupted) == (0, world.bounds.generation_batch)
    assert world.drained.seconds == pytest.approx(1.5)
    assert {group.feed_index for group in world.left.prompts} == world.taken


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_current_step_ends_and_is_saved(schedule: Schedule) -> None:
    world = drained(5.0, schedule, save="anywhere")
    assert [step.rollout for step in world.trace.of(StepEnded)] == [0]
    assert list(world.trainer.saved) == [0]
    assert (world.drained.abandoned, world.drained.unsaved) == (0, 0)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_step_that_takes_longer_than_the_drain_is_abandoned_and_its_groups_stay_leased(schedule: Schedule) -> None:
    world = drained(5.0, schedule, train_seconds=60.0, save="anywhere")
    assert world.trace.of(StepEnded) == []
    assert world.trainer.saved == {}
    assert world.drained.abandoned == BATCH
    assert world.drained.seconds == pytest.approx(10.0)
    [step] = world.trace.of(StepStarted)
    stored = {group.sequence: group for group in world.left.groups}
    assert all(stored[sequence].state is GroupState.LEASED for sequence in step.groups)
    assert all(stored[sequence].content is not None for sequence in step.groups)


def test_a_checkpoint_that_takes_longer_than_the_drain_is_abandoned() -> None:
    world = drained(5.0, save_seconds=60.0, save="anywhere")
    assert world.trainer.saved == {}
    assert world.drained.unsaved == 1
    assert world.drained.seconds == pytest.approx(10.0)


def test_an_evaluation_does_not_delay_the_end() -> None:
    world = DrainedWorld(
        config=config(eval_interval=1),
        schedule=Schedule.SYNCHRONOUS,
        problems=4,
        latency=lambda group, rng: 1000.0 if group.feed_index.startswith("eval") else 1.0,
        stop_after=5.0,
        continues=False,
    ).run()
    assert world.drained.seconds == pytest.approx(0.0, abs=0.2)
