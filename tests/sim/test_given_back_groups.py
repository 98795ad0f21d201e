"""Groups that a rollout function collects and gives back to the data source."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.events import GroupMoved
from miles_async.pipeline.rollout_source import RolloutFunction, RolloutSource
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.ledger import GroupState
from miles_async.types import DropReason, Group, Sample
from tests.configuration import run_config
from tests.sim.lost_workers import KILLS_WORKERS, LostWorkers
from tests.sim.world import World

pytestmark = KILLS_WORKERS

BATCH, ROLLOUTS = 4, 12

Form = Callable[[Group], list[Sample]]
FORMS: dict[str, Form] = {
    "the group": lambda group: group,
    "a new list": list,
    "a new list in another order": lambda group: list(reversed(group)),
    "a copy": deepcopy,
    "a list of copies": lambda group: [deepcopy(sample) for sample in group],
}


def config(**changes: Any) -> RunConfig:
    sizes = {"rollout_batch_size": BATCH, "num_rollout": ROLLOUTS, "n_samples_per_prompt": 2}
    return run_config(**{**sizes, "max_weight_staleness": 3, "no_progress_abort_seconds": 200, **changes})


async def collect(world: World, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
    if world.schedule is Schedule.FULLY_ASYNC:
        return await source.drain_stream(rollout_id, size)
    return await source.collect_batch(rollout_id, size, size)


def trained_twice(world: World) -> list[str]:
    return [name for name, times in Counter(chain.from_iterable(world.trainer.batches)).items() if times > 1]


def lost(world: World) -> set[str]:
    """Prompts that were taken from the data, and that are neither trained nor in progress nor waiting."""
    taken = {f"sample_0_{number}" for number in range(world.feed.position()["next"])}
    service = world.service
    known = {group.feed_index for group in (*service.lifecycle.live_groups, *service.held.taken.copies)}
    return taken - known - world.returned - world.dead_letters.prompts - set(chain.from_iterable(world.trainer.batches))


def assert_every_prompt_is_accounted_for(world: World) -> None:
    assert [len(batch) for batch in world.trainer.batches] == [BATCH] * ROLLOUTS
    assert trained_twice(world) == []
    assert lost(world) == set()
    assert world.audit.violations == []
    world.service.lifecycle.ledger.check_conservation()


def given_back(world: World) -> list[GroupMoved]:
    return [move for move in world.trace.of(GroupMoved) if move.reason is DropReason.GIVEN_BACK]


@dataclass(kw_only=True)
class GivingBack(World):
    """A user's function that collects one group more than it needs, and gives one back as `form` of it."""

    form: Form = field(default=lambda group: group)
    in_thread: bool = False
    repeats: int = 1

    def _rollout_function(self) -> RolloutFunction:
        return self._rollout

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await collect(self, rollout_id, source, BATCH + 1)
        surplus = groups.pop(0)
        for _ in range(self.repeats):
            if self.in_thread:
                thread = threading.Thread(target=source.add_samples, args=([self.form(surplus)],))
                thread.start()
                thread.join()
            else:
                source.add_samples([self.form(surplus)])
        assert [group.feed_index for group in source.buffer].count(surplus.feed_index) <= 1
        await asyncio.sleep(0.5)
        return groups


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("form", FORMS)
def test_a_group_that_is_given_back_frees_its_slot_and_is_trained_later(schedule: Schedule, form: str) -> None:
    world = GivingBack(config=config(), schedule=schedule, form=FORMS[form]).run()
    assert_every_prompt_is_accounted_for(world)
    assert len(given_back(world)) == ROLLOUTS
    assert world.service.lifecycle.ledger.counts[GroupState.LEASED] == 0


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_group_that_is_given_back_twice_counts_once(schedule: Schedule) -> None:
    world = GivingBack(config=config(), schedule=schedule, form=list, repeats=2).run()
    assert_every_prompt_is_accounted_for(world)
    assert len(given_back(world)) == ROLLOUTS


def test_a_group_that_is_given_back_keeps_its_tokens_and_its_attempts() -> None:
    world = GivingBack(config=config(max_weight_staleness=None), schedule=Schedule.SYNCHRONOUS).run()
    moves = given_back(world)
    assert all(move.kept_tokens > 0 and move.discarded_tokens == 0 for move in moves)
    again = {move.feed_index: move.attempt for move in world.trace.of(GroupMoved) if move.before is None}
    assert all(again[move.feed_index] == 0 for move in moves)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_group_may_be_given_back_in_another_thread(schedule: Schedule) -> None:
    world = GivingBack(config=config(), schedule=schedule, in_thread=True).run()
    assert_every_prompt_is_accounted_for(world)
    assert len(given_back(world)) == ROLLOUTS


@dataclass(kw_only=True)
class Reduced(GivingBack):
    """Collects groups that lost a sample, and gives them back."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await collect(self, rollout_id, source, BATCH + 1)
        surplus = groups.pop()
        surplus.leave_out([surplus[0]])
        source.add_samples([self.form(surplus)])
        [waiting] = [group for group in source.buffer if group.feed_index == surplus.feed_index]
        assert sorted(sample.index or 0 for sample in waiting) == [n + 2 * int(surplus.feed_index[9:]) for n in (0, 1)]
        return groups


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_group_that_lost_a_sample_is_given_back_as_a_whole(schedule: Schedule, form: str) -> None:
    assert_every_prompt_is_accounted_for(Reduced(config=config(), schedule=schedule, form=FORMS[form]).run())


class Emptying(GivingBack):
    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await collect(self, rollout_id, source, BATCH + 1)
        surplus = groups.pop()
        for sample in surplus:
            sample.reset()
        source.add_samples([surplus])
        return groups


@pytest.mark.parametrize("schedule", list(Schedule))
def test_samples_that_were_reset_are_generated_again(schedule: Schedule) -> None:
    world = Emptying(config=config(), schedule=schedule).run()
    assert_every_prompt_is_accounted_for(world)
    assert {move.kept_tokens for move in given_back(world)} == {0}


@dataclass(kw_only=True)
class Contradicting(GivingBack):
    """Returns the group that it has given back."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await collect(self, rollout_id, source, BATCH)
        source.add_samples([groups[0]])
        return [Group.of(self.form(groups[0])), *groups[1:]]


@pytest.mark.parametrize("form", ["the group", "a new list"])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_group_that_is_both_given_back_and_returned_is_refused(schedule: Schedule, form: str) -> None:
    world = Contradicting(config=config(), schedule=schedule, form=FORMS[form])
    with pytest.raises(UserError, match=r"returned group sample_0_\d+ a second time: return each group once, and ret"):
        world.run()


@dataclass(kw_only=True)
class Late(GivingBack):
    """Gives groups back that were returned `delay` calls ago."""

    delay: int = 1
    before: list[list[Group]] = field(default_factory=list)

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await collect(self, rollout_id, source, BATCH)
        if len(self.before) >= self.delay:
            source.add_samples([self.form(group) for group in self.before[-self.delay]])
        self.before.append(groups)
        return groups


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("delay", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_a_group_that_was_returned_for_training_is_not_trained_again(schedule: Schedule, delay: int, form: str) -> None:
    world = Late(config=config(), schedule=schedule, delay=delay, form=FORMS[form]).run()
    assert_every_prompt_is_accounted_for(world)
    assert given_back(world) == []


class Dropping(GivingBack):
    """Drops the group that it has given back."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await collect(self, rollout_id, source, BATCH + 1)
        surplus = groups.pop()
        source.add_samples([surplus])
        source.discard(self.form(surplus), "too easy")
        return groups


@pytest.mark.parametrize("form", ["the group", "a new list"])
def test_a_group_that_was_given_back_cannot_be_dropped(form: str) -> None:
    with pytest.raises(UserError, match=r"dropped group sample_0_\d+, which it had returned or given back"):
        Dropping(config=config(), schedule=Schedule.SYNCHRONOUS, form=FORMS[form]).run()


class Keeping(GivingBack):
    """Keeps a group that it collected, and gives it back in the next call."""

    kept: Group | None = None

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        if self.kept is not None:
            source.add_samples([self.form(self.kept)])
        groups = await collect(self, rollout_id, source, BATCH + 1)
        self.kept = groups.pop()
        return groups


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("form", ["the group", "a new list"])
def test_a_group_that_was_neither_returned_nor_given_back_can_be_given_back_in_a_later_call(
    schedule: Schedule, form: str
) -> None:
    world = Keeping(config=config(), schedule=schedule, form=FORMS[form]).run()
    assert trained_twice(world) == []
    last = {world.kept.feed_index} if world.kept is not None else set()
    assert lost(world) <= last
    assert world.audit.violations == []


@dataclass(kw_only=True)
class Taking(GivingBack):
    """Takes the groups again that it has given back, and generates some of them itself."""

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        groups = await collect(self, rollout_id, source, BATCH + 1)
        surplus = groups.pop()
        source.add_samples([self.form(surplus)])
        [taken] = source.get_samples(1)
        assert taken.feed_index == surplus.feed_index
        return [*groups[1:], taken] if rollout_id % 2 else groups


@pytest.mark.parametrize("form", ["the group", "a new list"])
@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.ONE_STEP_OFF])
def test_a_group_that_was_given_back_is_the_first_that_the_function_takes(schedule: Schedule, form: str) -> None:
    world = Taking(config=config(), schedule=schedule, form=FORMS[form]).run()
    assert [len(batch) for batch in world.trainer.batches] == [BATCH] * ROLLOUTS
    assert trained_twice(world) == []
    assert world.audit.violations == []


def test_a_checkpoint_contains_a_group_that_was_given_back_once() -> None:
    world = GivingBack(config=config(save="anywhere", save_interval=1), schedule=Schedule.ONE_STEP_OFF).run()
    for progress in world.trainer.saved.values():
        owed = [group["feed_index"] for group in progress["owed"]]
        assert max(Counter(owed).values(), default=1) == 1


@dataclass(kw_only=True)
class LostGivingBack(LostWorkers):
    """A function that gives groups back at random moments, in rollout workers that are killed."""

    moves: random.Random = field(default_factory=random.Random)

    def _rollout_function(self) -> RolloutFunction:
        return self._rollout

    async def _rollout(self, rollout_id: int, source: RolloutSource, size: int) -> list[Group]:
        """Collect up to three groups more than needed, and give some back, in any form, some of them twice."""
        moves = self.moves
        surplus: list[Group] = []
        groups: list[Group] = []
        while len(groups) < BATCH:
            groups += await collect(self, rollout_id, source, BATCH - len(groups) + moves.randint(0, 3))
            moves.shuffle(groups)
            while len(groups) > BATCH or (groups and moves.random() < 0.2):
                surplus.append(groups.pop())
                # Each group that the function keeps holds a slot, which the groups that it waits for need.
                if len(surplus) > 1 or moves.random() < 0.7:
                    self._give_back(source, surplus.pop())
            await asyncio.sleep(moves.choice((0.0, 0.1, 2.0)))
        for group in surplus:
            self._give_back(source, group)
        return [Group.of(moves.choice((lambda group: group, list))(group)) for group in groups]

    def _give_back(self, source: RolloutSource, group: Group) -> None:
        for _ in range(self.moves.choice((1, 1, 2))):
            source.add_samples([self.moves.choice(list(FORMS.values()))(group)])


schedules = st.sampled_from(list(Schedule))
seeds = st.integers(0, 10_000)


@settings(max_examples=60, deadline=None)
@given(schedule=schedules, seed=seeds, kills=st.integers(0, 4), limit=st.sampled_from([None, 1, 3]))
def test_groups_that_are_given_back_at_any_moment_are_neither_lost_nor_trained_twice(
    schedule: Schedule, seed: int, kills: int, limit: int | None
) -> None:
    world = LostGivingBack(
        config=config(max_weight_staleness=limit),
        schedule=schedule,
        seed=seed,
        kills=kills,
        longest_life=300,
        moves=random.Random(seed),
    ).run()
    assert_every_prompt_is_accounted_for(world)
