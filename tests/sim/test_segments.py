"""Trajectories of several segments survive lost workers, staleness and resumption; recycled prompts lose them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from miles_async.events import GroupMoved, StepEnded
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, SampleStatus, StepReport
from tests.sim.lost_workers import KILLS_WORKERS, LastingEngines, LastingTrainer, LostWorkers
from tests.sim.test_lost_workers import check, check_restored, config

pytestmark = KILLS_WORKERS


class BranchingEngines(LastingEngines):
    """Each trajectory ends with one to three segments, the number of which follows from the prompt."""

    async def generate(self, group: Group) -> None:
        assert len(group) == 2, "one sample per trajectory is generated"
        assert all(sample.trajectory is None for sample in group)
        await super().generate(group)
        if all(sample.status is SampleStatus.COMPLETED for sample in group):
            segments = [
                [replace(sample, trajectory=number, metadata={}) for _ in range(number_of_segments(group, number))]
                for number, sample in enumerate(group)
            ]
            group[:] = chain.from_iterable(segments)


def number_of_segments(group: Group, trajectory: int) -> int:
    return random.Random(f"{group.feed_index} {trajectory}").randint(1, 3)


class CountingTrainer(LastingTrainer):
    async def _train(self, rollout_id: int, groups: list[Group]) -> StepReport:
        for group in groups:
            found = [len(segments) for segments in group.trajectories]
            assert found == [number_of_segments(group, number) for number in range(2)]
            assert all(sample.reward == 1.0 for sample in group)
        return await super()._train(rollout_id, groups)


def branching(**arguments: Any) -> LostWorkers:
    world = LostWorkers(**arguments)
    world.engine_kind, world.trainer_kind = BranchingEngines, CountingTrainer
    return world


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("seed", range(3))
def test_no_segment_is_lost_or_trained_twice_when_the_rollout_worker_is_killed(seed: int, schedule: Schedule) -> None:
    world = branching(config=config(save="anywhere", save_interval=4), schedule=schedule, seed=seed).run()
    check(world)
    assert [step.reward for step in world.trace.of(StepEnded)] == [1.0] * len(world.trainer.batches)


@pytest.mark.parametrize("seed", range(3))
def test_groups_of_a_lost_learner_are_trained_again_with_all_their_segments(seed: int) -> None:
    settings = config(save="anywhere", save_interval=4)
    check_restored(branching(config=settings, kills=2, learner_kills=4, seed=seed).run())


def test_stale_groups_are_generated_again_from_one_sample_per_trajectory() -> None:
    world = branching(
        config=config(over_sampling_batch_size=32, max_weight_staleness=1),
        schedule=Schedule.ONE_STEP_OFF,
        kills=0,
        latency=lambda group, rng: 1.0,
    ).run()
    check(world)
    assert any(move.reason == DropReason.STALE for move in world.trace.of(GroupMoved))
