"""Prompts that a rollout function of the user took from the data source and still works on."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from itertools import chain

import pytest

from miles_async.config.schema import Learner, Rollout, RunConfig
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, VersionSpan
from tests.sim.world import World

ROLLOUTS, BATCH, HELD = 8, 4, 6


def run_config(*, save: bool = False) -> RunConfig:
    learner = Learner(save="anywhere", save_interval=5) if save else Learner()
    return RunConfig(
        rollout=Rollout(rollout_batch_size=BATCH, num_rollout=ROLLOUTS, n_samples_per_prompt=1), learner=learner
    )


def finish(group: Group, version: int) -> Group:
    for sample in group:
        # In place, as functions written for slime do.
        sample.tokens += [1, 2]
        sample.response_length, sample.rollout_log_probs = 1, [-0.5]
        sample.spans, sample.reward = [VersionSpan(version, 0, 1)], 1.0
    return group


class PersistentWorker(World):
    """A user's function that keeps prompts in progress from one call to the next, as slime's asynchronous worker."""

    flat = False

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        held: list[Group] = vars(self).setdefault("held", [])
        held += source.get_samples(BATCH + HELD - len(held))
        await asyncio.sleep(5.0)
        finished, self.held = held[:BATCH], held[BATCH:]
        groups = [finish(group, source.live_version) for group in finished]
        return [Group(list(group)) for group in groups] if self.flat else groups


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_contains_the_prompts_that_a_persistent_worker_holds(flat: bool) -> None:
    world = PersistentWorker(config=run_config(save=True), schedule=Schedule.ONE_STEP_OFF)
    world.flat = flat
    world.run()
    progress = world.trainer.saved[4]
    owed = [sample["index"] for group in progress["owed"] for sample in group["samples"]]
    assert max(Counter(owed).values()) == 1
    trained = set(range(5 * BATCH))
    assert trained | set(owed) == set(range(progress["data"]["next"]))
    assert all(sample["prompt_tokens"] == [] for group in progress["owed"][-HELD:] for sample in group["samples"])


def test_a_checkpoint_contains_a_prompt_without_the_tokens_that_a_function_added() -> None:
    world = PersistentWorker(config=run_config(), schedule=Schedule.ONE_STEP_OFF).run()
    held = world.service.held
    [group] = world.feed.get_samples(1)
    group[0].tokens = [7]
    held.record_taken([group])
    finish(group, 0)
    [taken] = [taken for taken in held.taken.copies if taken.feed_index == group.feed_index]
    assert taken[0].tokens == [7]


class Choosing(World):
    """A user's function that drops every second prompt, as a dynamic filter inside the function does."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = source.get_samples(2 * BATCH)
        await asyncio.sleep(5.0)
        return [finish(group, source.live_version) for group in groups[::2]]


def test_a_checkpoint_does_not_contain_prompts_that_a_function_dropped() -> None:
    world = Choosing(config=run_config(), schedule=Schedule.ONE_STEP_OFF).run()
    gc.collect()
    world.service.held.taken.pop_unused()
    assert world.service.held.taken.copies == []
    assert len(set(chain.from_iterable(world.trainer.batches))) == ROLLOUTS * BATCH
