"""A rollout worker that is killed at any moment is replaced, and no group is lost or trained twice."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.events import Evaluated, LearnerRestored, PublishEnded, StepEnded, StepStarted
from miles_async.fault_points import all_points
from miles_async.pipeline import restore
from miles_async.pipeline.journal import Journal
from miles_async.pipeline.lifecycle import GroupLifecycle
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.lineage import Lineage
from miles_async.stored_run import Changes, StoredGroup, StoredRun
from miles_async.types import DropReason, Group
from tests.audit import Audit
from tests.configuration import run_config
from tests.sim.lost_workers import KILLS_WORKERS, LostWorkers, LostWorkersOfAnExternalGenerator, MemoryStore
from tests.sim.world import World

pytestmark = KILLS_WORKERS

ROLLOUTS, BATCH = 20, 8
REACHED = (
    "clock.",
    "store.write",
    "outbox.",
    "data.get",
    "generator.generate",
    "rewarder.",
    "channel.s",
    "ranks.give_batch",
    "ranks.on_all",
    "learner.train",
    "learner.w",
    "learner.copy",
    "fleet.pause",
    "fleet.commit",
    "fleet.resume",
)
"""Points that each life of a simulated rollout worker reaches often enough."""


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


@pytest.mark.parametrize("point", [point for point in all_points() if point.startswith(REACHED)])
def test_no_group_is_lost_or_trained_twice_when_the_rollout_worker_is_killed_at_this_point(point: str) -> None:
    world = LostWorkers(config=config(save="anywhere", save_interval=1), point=point, longest_life=5, seed=5).run()
    check(world)
    assert world.lives == 4, "each life ended at the point"


def check_restored(world: LostWorkers) -> None:
    """The batches of the last learner's weights are complete, each prompt was trained once, and none was lost."""
    assert world.audit.violations == []
    assert world.audit.owed <= world.unfinished | world.dead_letters.prompts
    trained = Counter(chain.from_iterable(world.trainer.batches))
    assert set(trained.values()) == {1}, "no prompt is trained twice"
    assert [len(batch) for batch in world.trainer.batches] == [BATCH] * ROLLOUTS
    taken = {f"sample_0_{number}" for number in range(world.feed._next)}
    assert taken == set(trained) | world.unfinished | world.dead_letters.prompts, "no prompt is lost"
    versions = [event.version for event in world.trace.of(PublishEnded)]
    assert versions == sorted(versions), "no version number is used for two different weights"


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("seed", range(12))
def test_every_prompt_is_trained_once_by_the_weights_that_survive_the_loss_of_learners(
    seed: int, schedule: Schedule
) -> None:
    settings = config(save="anywhere", save_interval=4)
    world = LostWorkers(config=settings, schedule=schedule, kills=0, learner_kills=4, seed=seed).run()
    check_restored(world)


@pytest.mark.parametrize("off_lineage", ["recycle", "train"])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_learner_and_rollout_worker_may_be_lost_together(seed: int, interval: int, off_lineage: str) -> None:
    settings = config(
        save="anywhere",
        save_interval=5,
        update_weights_interval=interval,
        off_lineage=off_lineage,
        num_rollout=ROLLOUTS,
    )
    world = LostWorkers(config=settings, kills=4, longest_life=900, learner_kills=4, train_seconds=2.0, seed=seed)
    world.audit = Audit(3, trains_off_lineage=off_lineage == "train")
    check_restored(world.run())


def test_finite_data_is_trained_to_its_end_however_often_the_learner_is_lost() -> None:
    settings = config(save="anywhere", save_interval=4)
    world = LostWorkers(config=settings, prompts=ROLLOUTS * BATCH, kills=3, learner_kills=5, seed=2)
    world.longest_learner_life = 20.0
    check_restored(world.run())
    assert len(world.trace.of(LearnerRestored)) >= 3


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
    lost = world.service.lifecycle.ledger.dropped[DropReason.WORKER_LOST]
    assert 0 < lost <= 4 * world.bounds.generation_batch, "only groups in flight"


def test_the_samples_of_a_restored_group_are_loaded_when_a_batch_needs_them() -> None:
    world = LostWorkers(config=config(), train_seconds=5.0, kills=4, longest_life=800, seed=1).run()
    batches = set(chain.from_iterable(step.groups for step in world.trace.of(StepStarted)))
    assert world.store.loaded
    assert set(world.store.loaded) <= batches


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


@pytest.mark.parametrize("learner_kills", [0, 3])
@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.ONE_STEP_OFF])
def test_posted_groups_that_were_acknowledged_are_trained_once(schedule: Schedule, learner_kills: int) -> None:
    settings = config(max_weight_staleness=None, queue_capacity=2 * BATCH, save="anywhere", save_interval=4)
    worlds = [
        LostWorkersOfAnExternalGenerator(
            config=settings,
            schedule=schedule,
            kills=6,
            longest_life=100,
            learner_kills=learner_kills,
            longest_learner_life=30.0,
            train_seconds=2.0,
            seed=seed,
        ).run()
        for seed in range(8)
    ]
    assert sum(world.lives for world in worlds) > 24
    for world in worlds:
        assert world.audit.violations == []
        trained = Counter(chain.from_iterable(world.trainer.batches))
        assert len(world.trainer.batches) == ROLLOUTS
        order = [f"external_{number}" for number in range(ROLLOUTS * BATCH)]
        assert trained == Counter(order), "groups are trained once, in the order in which they were posted"
        names = {name: key for key, name in world.acknowledged.items()}
        assert len(names) == len(world.acknowledged), "no name is given twice"
        assert names.keys() <= trained.keys() | world.store.posted.keys(), "no group is lost"
        acknowledged = {name: key for name, key in world.trained_keys.items() if name in names}
        assert acknowledged.items() <= names.items(), "each group keeps its samples"


def lossy_world(seed: int) -> LostWorkers:
    settings = config(save="anywhere", save_interval=6)
    return LostWorkers(config=settings, kills=3, longest_life=900, learner_kills=4, seed=seed)


def found(planted: str, worlds: int = 12) -> bool:
    """Whether the audit reports the violation in one of several runs. Such a run may also fail."""
    for seed in range(worlds):
        world = lossy_world(seed)
        with suppress(Exception):
            world.run()
        if any(planted in violation for violation in world.audit.violations):
            return True
    return False


def test_the_audit_finds_a_transaction_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    write = MemoryStore.write

    async def forgets(self: MemoryStore, changes: Changes) -> None:
        await write(self, replace(changes, groups={}) if changes.number % 7 == 0 else changes)

    monkeypatch.setattr(MemoryStore, "write", forgets)
    assert found("without being in it")


def test_the_audit_finds_a_group_that_is_trained_again_although_the_checkpoint_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undone_batches = restore._undone_batches

    def too_many(stored: StoredRun, last: int, next_rollout: int) -> list[StoredGroup]:
        kept = [group for group in stored.groups if group.rollout is not None and group.rollout <= last]
        return kept + undone_batches(stored, last, next_rollout)

    monkeypatch.setattr(restore, "_undone_batches", too_many)
    monkeypatch.setattr(Journal, "save", lambda self, rollout: None)
    assert found("its training was not undone")


def test_the_audit_finds_tokens_of_weights_that_were_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lineage, "includes", lambda self, version: True)
    assert found("tokens of versions that were rolled back")


def test_the_audit_finds_a_slot_that_an_ended_attempt_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    requeue = GroupLifecycle.requeue

    def keeps_slot(self: GroupLifecycle, group: Group, reason: DropReason) -> None:
        if reason is not DropReason.WORKER_LOST:
            requeue(self, group, reason)
            return
        self.data.add_samples([Group.from_prompt_dict(group.prompt_dict())])

    monkeypatch.setattr(GroupLifecycle, "requeue", keeps_slot)
    assert found("while an attempt at it holds a slot")
