"""A rollout worker that is killed at any moment is replaced, and no group is lost or trained twice."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.events import Evaluated, PublishEnded, StepEnded, StepStarted
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason
from tests.configuration import run_config
from tests.sim.lost_workers import LostWorkers
from tests.sim.world import World

# The tasks of a worker that is killed do not end in an orderly way.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROLLOUTS, BATCH = 20, 8


def config(**settings: Any) -> RunConfig:
    sizes: dict[str, Any] = {"rollout_batch_size": BATCH, "num_rollout": ROLLOUTS, "n_samples_per_prompt": 2}
    return run_config(**sizes | {"max_weight_staleness": 3} | settings)


def check(world: LostWorkers) -> None:
    """All batches were trained, in order, each prompt once, none too stale, and no prompt was lost."""
    assert world.audit.violations == []
    trained = Counter(chain.from_iterable(world.trainer.batches))
    assert set(trained.values()) == {1}, "no prompt is trained twice"
    assert len(world.trainer.batches) == ROLLOUTS
    assert [step.rollout for step in world.trace.of(StepEnded)] == list(range(ROLLOUTS))
    taken = {f"sample_0_{number}" for number in range(world.feed._next)}
    assert taken == set(trained) | world.unfinished | world.dead_letters.prompts, "no prompt is lost"
    versions = [event.version for event in world.trace.of(PublishEnded)]
    assert versions == sorted(versions)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("seed", range(12))
def test_no_group_is_lost_or_trained_twice_when_the_rollout_worker_is_killed_at_any_call(
    seed: int, schedule: Schedule
) -> None:
    world = LostWorkers(config=config(save="anywhere", save_interval=4), schedule=schedule, seed=seed).run()
    check(world)
    assert sorted(world.trainer.saved) == [3, 7, 11, 15, 19]


def test_a_prompt_of_finite_data_is_trained_once_however_often_the_rollout_worker_is_killed() -> None:
    world = LostWorkers(config=config(), prompts=ROLLOUTS * BATCH, kills=8, longest_life=600, seed=3).run()
    assert world.lives > 5
    assert Counter(chain.from_iterable(world.trainer.batches)) == Counter(
        f"sample_0_{number}" for number in range(ROLLOUTS * BATCH)
    )


def test_groups_that_had_finished_are_not_generated_again() -> None:
    world = LostWorkers(config=config(), train_seconds=5.0, kills=4, longest_life=800, seed=1).run()
    check(world)
    assert world.lives == 5
    lost = world.service.run_state.ledger.dropped[DropReason.WORKER_LOST]
    assert 0 < lost <= 4 * world.bounds.generation_batch, "only groups in flight"


def test_a_batch_that_the_learner_trained_while_no_rollout_worker_lived_is_counted() -> None:
    worlds = [LostWorkers(config=config(), train_seconds=30.0, seed=seed).run() for seed in range(10)]
    for world in worlds:
        check(world)
    assert any(len(world.trace.of(StepStarted)) == ROLLOUTS and world.lives > 1 for world in worlds), (
        "the learner ended a step in time, so the step is not repeated"
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_rollout_worker_may_be_lost_again_while_it_restores_the_run(seed: int) -> None:
    # It waits for the learner, which is still taking the step that the first rollout worker asked for.
    check(LostWorkers(config=config(), train_seconds=20.0, kills=8, longest_life=400, seed=seed).run())


@pytest.mark.parametrize("seed", range(5))
def test_a_resumed_run_whose_rollout_worker_is_lost_trains_every_prompt_of_its_checkpoint_once(seed: int) -> None:
    prompts = ROLLOUTS * BATCH
    first = World(config=config(save="anywhere", save_interval=7), prompts=prompts, seed=seed).run()
    resumed = LostWorkers(
        config=config(), prompts=prompts, resume_from=first.trainer.saved[6], kills=6, longest_life=120, seed=seed
    ).run()
    assert resumed.lives > 1
    assert resumed.audit.violations == []
    trained = Counter(chain.from_iterable(first.trainer.batches[:7] + resumed.trainer.batches))
    assert trained == Counter(f"sample_0_{number}" for number in range(prompts))


@pytest.mark.parametrize("seed", range(10))
def test_every_evaluation_that_is_due_is_made_once_or_overtaken_by_a_newer_one(seed: int) -> None:
    settings = config(save="anywhere", eval_interval=4)
    world = LostWorkers(config=settings, problems=4, kills=6, longest_life=500, seed=seed).run()
    check(world)
    evaluated = [evaluation.rollout for evaluation in world.trace.of(Evaluated)]
    assert evaluated == sorted(set(evaluated))
    assert (evaluated[0], evaluated[-1]) == (-1, ROLLOUTS - 1)
    assert list(world.trainer.saved) == [ROLLOUTS - 1]


def test_the_store_holds_only_what_is_live() -> None:
    world = LostWorkers(config=config(num_rollout=ROLLOUTS)).run()
    assert world.store.largest < 2 * (world.bounds.slots or 0) + BATCH
