"""Rollout functions that return new lists of samples instead of the groups that they collected."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain

import pytest

from miles_async.config.schema import Rollout, RunConfig
from miles_async.errors import UserError
from miles_async.events import GroupFiltered
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.rollout.contract import as_groups
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.ledger import GroupState
from miles_async.types import Group, Sample, SampleStatus, VersionSpan
from tests.sim.world import World

Rebuild = Callable[[list[Group]], object]


def run_config(**rollout: object) -> RunConfig:
    settings = {"rollout_batch_size": 8, "num_rollout": 20, "n_samples_per_prompt": 2, "max_weight_staleness": 3}
    return RunConfig(rollout=Rollout.model_validate({**settings, **rollout}))


@dataclass(kw_only=True)
class Wrapping(World):
    """A user's function that collects groups and returns `rebuild` of them."""

    rebuild: Rebuild

    def _rollout_function(self) -> RolloutFunction:
        return self._rollout

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        rollout = self.config.rollout
        size = rollout.rollout_batch_size
        if self.schedule is Schedule.FULLY_ASYNC:
            groups = await source.drain_stream(rollout_id, size)
        else:
            groups = await source.collect_batch(rollout_id, size, self.bounds.generation_batch)
        return as_groups(self.rebuild(groups), rollout.n_samples_per_prompt, rollout.n_samples_per_prompt)


def flat(groups: list[Group]) -> object:
    return list(chain.from_iterable(groups))


def plain_lists(groups: list[Group]) -> object:
    return [list(group) for group in reversed(groups)]


def copies(groups: list[Group]) -> object:
    return [[deepcopy(sample) for sample in group] for group in groups]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("rebuild", [flat, plain_lists, copies])
def test_groups_that_a_function_rebuilds_are_trained_as_the_groups_that_it_collected(
    schedule: Schedule, rebuild: Rebuild
) -> None:
    world = Wrapping(config=run_config(), schedule=schedule, rebuild=rebuild).run()
    assert [len(batch) for batch in world.trainer.batches] == [8] * 20
    assert world.trace.of(GroupFiltered) == []
    assert all(name.startswith("sample_0_") for batch in world.trainer.batches for name in batch)
    assert world.audit.violations == []


class Adding(Wrapping):
    """A user's function that replaces half of each batch with groups that it makes."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await super()._rollout(rollout_id, source, size)
        made = []
        for number in range(4):
            sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], reward=1.0)
            sample.spans, sample.status = [VersionSpan(source.live_version, 0, 1)], SampleStatus.COMPLETED
            made.append(Group([sample, replace(sample)], feed_index=f"made_{rollout_id}_{number}"))
        return groups[:4] + made


@pytest.mark.parametrize("schedule", list(Schedule))
def test_groups_that_a_function_makes_itself_do_not_block_the_window(schedule: Schedule) -> None:
    settings = run_config(max_weight_staleness=None, windowed_fifo_ratio=0.0)
    world = Adding(config=settings, schedule=schedule, rebuild=list).run()
    assert [len(batch) for batch in world.trainer.batches] == [8] * 20
    assert {event.reason for event in world.trace.of(GroupFiltered)} == {"rollout_function"}
    assert world.service.lifecycle.ledger.counts[GroupState.LEASED] == 0
    assert world.audit.violations == []


def test_a_group_that_is_returned_in_two_lists_is_refused() -> None:
    def twice(groups: list[Group]) -> object:
        return [*map(list, groups[1:]), list(groups[1])]

    with pytest.raises(UserError, match=r"returned group sample_0_\d+ a second time"):
        Wrapping(config=run_config(), schedule=Schedule.SYNCHRONOUS, rebuild=twice).run()


class Late(Wrapping):
    """A user's function that returns the batch that is being trained once more."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        if rollout_id == 0:
            self.groups = await super()._rollout(rollout_id, source, size)
        return self.groups


def test_a_batch_that_is_returned_again_while_it_trains_is_refused() -> None:
    with pytest.raises(UserError, match="a second time"):
        Late(config=run_config(), schedule=Schedule.ONE_STEP_OFF, rebuild=list).run()
