"""Some prompts crash every engine that generates them: they are found, and their neighbours are not charged."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_async.events import Evaluated, GroupMoved, StepEnded
from miles_async.pipeline.checkpoint import progress_of
from miles_async.scheduling.bounds import Schedule
from miles_async.scheduling.quarantine import CULPRIT_LOSSES
from miles_async.types import DropReason, Group, SampleStatus
from tests.configuration import run_config
from tests.sim.test_repair import START_SECONDS, Fate, MortalEngines
from tests.sim.world import World

BATCHES = 12


class CrashingEngines(MortalEngines):
    """An engine that generates one of the `culprits` dies with all its requests after the next of `delays` seconds."""

    culprits: Collection[str] = ()
    delays: Sequence[float] = (0.4,)
    crashes = 0

    async def _serve(self, group: Group, lengths: list[float]) -> tuple[SampleStatus, int | None]:
        if group.feed_index not in self.culprits:
            return await super()._serve(group, lengths)
        routed = [name for name, server in self.servers.items() if server.routed]
        name = min(routed, key=lambda name: len(self.servers[name].holds), default=None)
        if name is not None and self.servers[name].alive:
            delay = self.delays[self.crashes % len(self.delays)]
            self.crashes += 1
            asyncio.get_running_loop().call_later(delay, self._die, name)
        return await super()._serve(group, [1e9])


def play(
    culprits: Collection[int],
    *,
    engines: int = 2,
    delays: Sequence[float] = (0.4,),
    schedule: Schedule = Schedule.FULLY_ASYNC,
    seed: int = 0,
    problems: int = 0,
    world_kind: type[World] = World,
) -> World:
    config = run_config(rollout_batch_size=8, num_rollout=BATCHES, n_samples_per_prompt=2, max_weight_staleness=3)
    kind = type(
        "Crashing",
        (CrashingEngines,),
        {"fate": Fate(engines=engines), "culprits": {f"sample_0_{i}" for i in culprits}, "delays": delays},
    )
    return world_kind(config=config, engine_kind=kind, schedule=schedule, seed=seed, problems=problems).run()


def check_that_only_culprits_are_charged(world: World, culprits: Collection[int]) -> None:
    names = {f"sample_0_{i}" for i in culprits}
    assert world.dead_letters.prompts <= names
    assert {reason for _, reason, _ in world.dead_letters.letters} <= {DropReason.ENGINE_LOST}
    assert {move.attempt for move in world.trace.of(GroupMoved)} == {0}, "no attempt is charged"
    assert len(world.trace.of(StepEnded)) == BATCHES
    assert world.audit.violations == []
    assert not {prompt for batch in world.trainer.batches for prompt in batch} & names
    assert world.fleet.crashes <= CULPRIT_LOSSES * len(culprits)  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("engines", [1, 2])
def test_a_prompt_that_crashes_engines_is_found_and_no_other_is_charged(engines: int, schedule: Schedule) -> None:
    world = play([3], engines=engines, schedule=schedule)
    check_that_only_culprits_are_charged(world, [3])
    assert world.dead_letters.prompts == {"sample_0_3"}
    undisturbed = play([], engines=engines, schedule=schedule)
    assert world.seconds < undisturbed.seconds + CULPRIT_LOSSES * (START_SECONDS + 20), "the search is bounded"


def test_neighbours_of_a_crash_are_trained() -> None:
    world = play([3])
    lost = {move.feed_index for move in world.trace.of(GroupMoved) if move.reason == DropReason.ENGINE_LOST}
    trained = {prompt for batch in world.trainer.batches for prompt in batch}
    owed = {group.feed_index for group in world.service.lifecycle.live_groups} | world.returned
    owed |= {group.feed_index for group in world.service.lifecycle.quarantine.waiting}
    assert len(lost) > 1
    assert lost - {"sample_0_3"} <= trained | owed


@settings(max_examples=10)
@given(
    culprits=st.sets(st.integers(0, 40), max_size=4),
    delays=st.lists(st.sampled_from([0.0, 0.05, 0.4, 1.1, 2.5, 7.0]), min_size=1, max_size=5),
    engines=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_whatever_the_order_of_crashes_only_culprits_are_charged(
    culprits: set[int], delays: list[float], engines: int, seed: int
) -> None:
    check_that_only_culprits_are_charged(play(culprits, engines=engines, delays=delays, seed=seed), culprits)


def test_an_evaluation_beside_a_crashing_prompt_has_its_true_score() -> None:
    world = play([20], problems=32)
    check_that_only_culprits_are_charged(world, [20])
    assert [event.accuracy for event in world.trace.of(Evaluated)] == [1.0, 1.0]


def test_a_checkpoint_contains_the_prompts_that_wait_to_be_tried_alone() -> None:
    owed_while_waiting: list[bool] = []

    class Watching(World):
        async def _prepare(self, rollout_id: int, groups: list[Group]) -> None:
            service = self.service
            waiting = {group.feed_index for group in service.lifecycle.quarantine.waiting}
            if waiting:
                progress = progress_of(rollout_id, service.run_state, service.lifecycle, service.held.snapshot)
                owed = {group["feed_index"] for group in progress["owed"]}
                owed_while_waiting.append(waiting <= owed)

    play([3, 9, 14], world_kind=Watching)
    assert owed_while_waiting
    assert all(owed_while_waiting)
