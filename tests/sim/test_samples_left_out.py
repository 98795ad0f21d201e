"""Groups that are trained without some of their samples are complete again wherever their prompt returns."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.events import GroupGenerated, GroupMoved
from miles_async.pipeline.checkpoint import resume
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.rollout.contract import RolloutFunctionAdapter, flat_args
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, Sample, SampleStatus, VersionSpan
from tests.configuration import run_config
from tests.sim.agents import AgentModel, AgentWorld
from tests.sim.lost_workers import KILLS_WORKERS, LostWorkers
from tests.sim.world import DirectJournal, Feed, Trace, World

pytestmark = KILLS_WORKERS

SAMPLES, BATCH = 4, 4


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": BATCH, "num_rollout": 8, "n_samples_per_prompt": SAMPLES}
    return run_config(**sizes | {"min_samples_per_group": SAMPLES - 1, "max_weight_staleness": 3} | settings)


def test_a_checkpoint_that_is_written_while_groups_lack_samples_can_be_loaded() -> None:
    settings = config(num_rollout=20, min_samples_per_group=1, max_attempts=2, save="anywhere", save_interval=5)
    world = AgentWorld(config=settings, agents=AgentModel(failure_rate=0.4), train_seconds=20.0).run()
    assert any(event.missing for event in world.trace.of(GroupGenerated))
    for progress in world.trainer.saved.values():
        feed = Feed(SAMPLES)
        resume(progress, feed, DirectJournal(Trace()))
        owed = feed.get_samples(len(progress["owed"]))
        assert [len(group) for group in owed] == [SAMPLES] * len(owed)
        assert all(len({sample.index for sample in group}) == SAMPLES for group in owed)


def test_a_run_that_is_resumed_from_such_a_checkpoint_trains_every_prompt_once() -> None:
    settings: dict[str, Any] = {"min_samples_per_group": 1, "max_attempts": 2, "num_rollout": 20}
    model = AgentModel(failure_rate=0.4)
    saving = config(**settings, save="anywhere", save_interval=5)
    first = AgentWorld(config=saving, agents=model, train_seconds=20.0).run()
    resumed = AgentWorld(config=config(**settings), agents=model, resume_from=first.trainer.saved[9]).run()
    trained = Counter(chain.from_iterable(first.trainer.batches[:10] + resumed.trainer.batches))
    assert set(trained.values()) == {1}
    assert resumed.audit.violations == []


async def zero_log_probs(sample: Sample) -> None:
    sample.rollout_log_probs = [0.0] * sample.response_length


def answer(sample: Sample, version: int) -> None:
    sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-0.5]
    sample.reward, sample.status, sample.spans = 1.0, SampleStatus.COMPLETED, [VersionSpan(version, 0, 1)]


async def with_a_failed_sample(args: Any, rollout_id: int, source: RolloutSource, evaluation: bool = False) -> Any:
    """The function returns complete groups, and the first sample of each failed."""
    groups = source.get_samples(args.rollout_batch_size)
    version = source.live_version
    await asyncio.sleep(3.0)
    for first, *others in groups:
        first.status = SampleStatus.FAILED
        for sample in others:
            answer(sample, version)
    return [list(group) for group in groups]


async def without_a_sample(args: Any, rollout_id: int, source: RolloutSource, evaluation: bool = False) -> Any:
    """The function does not return the first sample of each group."""
    return [group[1:] for group in await with_a_failed_sample(args, rollout_id, source)]


NUMBERS = count()


async def with_own_prompts(args: Any, rollout_id: int, source: RolloutSource, evaluation: bool = False) -> Any:
    """The function makes up its prompts, which the data source does not know, and returns fewer samples."""
    version = source.live_version
    await asyncio.sleep(3.0)
    names = [{"feed_index": f"own_{next(NUMBERS)}"} for _ in range(args.rollout_batch_size)]
    groups = [[Sample(prompt="own", metadata=dict(name)) for _ in range(SAMPLES - 1)] for name in names]
    for sample in chain.from_iterable(groups):
        answer(sample, version)
    return groups


async def without_a_collected_sample(
    args: Any, rollout_id: int, source: RolloutSource, evaluation: bool = False
) -> Any:
    """The function collects its batch through the pipeline, and returns new lists without the first samples."""
    groups = await source.collect_batch(rollout_id, args.rollout_batch_size, args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.rollout_log_probs = [-0.5] * sample.response_length
    return [group[1:] for group in groups]


FUNCTIONS = [with_a_failed_sample, without_a_sample, with_own_prompts, without_a_collected_sample]


def too_old_once(function: Any) -> Any:
    """The tokens of the batch of rollout 4 count as sampled by weights that are too old."""

    async def aged(args: Any, rollout_id: int, source: RolloutSource, evaluation: bool = False) -> Any:
        groups = await function(args, rollout_id, source)
        for sample in chain.from_iterable(groups) if rollout_id == 4 else ():
            if sample.spans:
                sample.spans = [VersionSpan(0, 0, sample.response_length)]
        return groups

    return aged


@dataclass(kw_only=True)
class Own(LostWorkers):
    """The batches come from a user's rollout function. Without `kills`, the rollout worker lives to the end."""

    function: Any
    schedule: Schedule = Schedule.ONE_STEP_OFF
    kills: int = 0
    longest_life: int = 2

    def _rollout_function(self) -> RolloutFunction | None:
        return RolloutFunctionAdapter(self.function, flat_args(self.config), self.config, score_tokens=zero_log_probs)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_a_lost_rollout_worker_is_replaced_while_groups_lack_samples(function: Any, seed: int) -> None:
    world = Own(config=config(), function=function, kills=3, point="learner.train.before", seed=seed).run()
    assert world.lives == 4
    assert len(world.trainer.batches) == 8
    assert world.audit.violations == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_groups_without_some_samples_that_are_too_stale_are_generated_again(function: Any) -> None:
    world = Own(config=config(), function=too_old_once(function)).run()
    stale = [moved for moved in world.trace.of(GroupMoved) if moved.reason == DropReason.STALE]
    assert len(stale) == BATCH
    assert len(world.trainer.batches) == 8
    assert world.audit.violations == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_checkpoint_has_complete_prompts_if_a_rollout_function_leaves_samples_out(function: Any) -> None:
    world = Own(config=config(save="anywhere", save_interval=2), function=function, train_seconds=9.0).run()
    owed = [group for progress in world.trainer.saved.values() for group in progress["owed"]]
    assert owed
    assert {len(group["samples"]) for group in owed} == {SAMPLES}


class GivesBack(World):
    """The rollout function gives a group back without its first sample, and takes it again."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = source.get_samples(BATCH)
        source.add_samples([groups[0][1:]])
        again = source.get_samples(1)
        assert [len(group) for group in again] == [SAMPLES]
        batch = [*groups[1:], *again]
        for sample in chain.from_iterable(batch):
            answer(sample, source.live_version)
        return batch


def test_a_taken_group_that_is_given_back_without_a_sample_is_complete_when_it_is_taken_again() -> None:
    world = GivesBack(config=config(), schedule=Schedule.ONE_STEP_OFF).run()
    assert set(Counter(chain.from_iterable(world.trainer.batches)).values()) == {1}
    assert world.audit.violations == []
