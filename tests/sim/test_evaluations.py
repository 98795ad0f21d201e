"""Evaluations name the weight versions that they ran on, and do not queue up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.events import Evaluated, EvaluationSkipped, PublishEnded
from miles_async.pipeline.evaluate import Scores
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group
from tests.configuration import run_config
from tests.sim.world import World

EVAL_SECONDS = 25.0
ASYNCHRONOUS = [Schedule.FULLY_ASYNC, Schedule.ONE_STEP_OFF]


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": 4, "num_rollout": 60, "n_samples_per_prompt": 1, "max_weight_staleness": 3}
    return run_config(**sizes | settings)


def latency(group: Group, rng: object) -> float:
    return EVAL_SECONDS if group.feed_index.startswith("eval") else 1.0


def live_version(world: World, time: float) -> int:
    return max(event.version for event in world.trace.of(PublishEnded) if event.time <= time)


def evaluated(world: World) -> list[int]:
    return [event.rollout for event in world.trace.of(Evaluated)]


def skipped(world: World) -> list[int]:
    return [event.rollout for event in world.trace.of(EvaluationSkipped)]


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_evaluations_that_take_longer_than_their_interval_are_skipped_and_not_queued(schedule: Schedule) -> None:
    world = World(config=config(eval_interval=5), schedule=schedule, problems=2, latency=latency).run()
    assert len(skipped(world)) >= 3
    assert sorted(evaluated(world) + skipped(world)) == [-1, *range(4, 60, 5)]
    assert evaluated(world)[-1] == 59, "the evaluation at the end of the run is never skipped"
    for event in world.trace.of(EvaluationSkipped):
        assert event.overtaken_by == event.rollout + 5
    for event in world.trace.of(Evaluated):
        # Version 1 is that of rollout 0. Publishing the version of the rollout may still take a moment.
        assert event.rollout <= event.versions[0] <= event.rollout + 1 + 5


@pytest.mark.parametrize("schedule", list(Schedule))
def test_an_evaluation_names_the_versions_that_were_live_while_it_ran(schedule: Schedule) -> None:
    world = World(config=config(eval_interval=20), schedule=schedule, problems=2, latency=latency).run()
    assert skipped(world) == []
    for event in world.trace.of(Evaluated):
        began = event.time - event.seconds
        assert event.versions == (live_version(world, began), live_version(world, event.time))
    if schedule is not Schedule.SYNCHRONOUS:
        assert any(oldest < newest for oldest, newest in (event.versions for event in world.trace.of(Evaluated)))


async def slow(rollout_id: int, source: RolloutSource) -> Scores:
    await asyncio.sleep(EVAL_SECONDS)
    return {"mine": {"rewards": [1.0]}}


def test_a_users_evaluation_is_labelled_with_the_live_versions_at_its_start_and_end() -> None:
    world = World(config=config(eval_interval=20), evaluate=slow).run()
    first, beside, *_ = world.trace.of(Evaluated)
    assert first.versions == (0, 0)
    began = beside.time - beside.seconds
    assert beside.versions == (live_version(world, began), live_version(world, beside.time))
    assert beside.versions[0] < beside.versions[1]


def test_a_users_evaluation_that_is_slow_is_skipped_too() -> None:
    world = World(config=config(eval_interval=5), evaluate=slow).run()
    assert len(skipped(world)) >= 3
    assert sorted(evaluated(world) + skipped(world)) == [-1, *range(4, 60, 5)]
    assert len(world.trainer.batches) == 60


def test_a_users_evaluation_may_name_its_versions() -> None:
    async def mine(rollout_id: int, source: RolloutSource) -> Scores:
        return {"mine": {"rewards": [1.0], "versions": [2, 5]}}

    world = World(config=config(num_rollout=2), evaluate=mine).run()
    assert [event.versions for event in world.trace.of(Evaluated)] == [(2, 5), (2, 5)]
