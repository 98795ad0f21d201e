"""A deadline for a slow head of the window, and concurrency that adapts to how full the engines are."""

from __future__ import annotations

import random
from typing import Any

from miles_async.config.schema import Engine, RunConfig
from miles_async.events import AdmissionBlocked, BatchDrained, GroupMoved
from miles_async.types import DropReason, Group, SampleStatus
from tests.configuration import run_config
from tests.sim.engines import EngineModel, Engines, Latency
from tests.sim.world import World


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": 8, "num_rollout": 40, "n_samples_per_prompt": 2}
    return run_config(**sizes | settings)


def stuck(prompt: int, seconds: float) -> Latency:
    def latency(group: Group, rng: random.Random) -> float:
        return seconds if group.feed_index == f"sample_0_{prompt}" else 1.0

    return latency


def drops(world: World, reason: DropReason) -> list[str]:
    return [moved.feed_index for moved in world.trace.of(GroupMoved) if moved.reason == reason]


def test_a_group_that_becomes_the_head_before_its_admission_has_a_deadline_too() -> None:
    """The trainer is slow: everything is collected, and the head is a group that is not admitted yet for 20 s."""
    world = World(
        config=config(
            max_weight_staleness=1,
            num_rollout=8,
            head_deadline_seconds=5.0,
            head_deadline_action="recycle",
            max_attempts=1,
        ),
        latency=stuck(prompt=33, seconds=1e6),
        train_seconds=20.0,
    ).run()
    assert world.dead_letters.letters[0][:2] == ("sample_0_33", DropReason.HEAD_DEADLINE)
    assert world.audit.violations == []


def test_a_salvaged_head_continues_from_its_tokens_with_their_first_version() -> None:
    world = World(
        config=config(head_deadline_seconds=5.0, head_deadline_action="salvage"), latency=stuck(prompt=40, seconds=23.0)
    ).run()
    assert drops(world, DropReason.HEAD_DEADLINE) == ["sample_0_40"] * 4, "4 times 5 s, and the rest of the 23 s"
    assert world.audit.greatest_age >= 20
    assert world.audit.violations == []


def test_a_salvaged_head_that_grew_too_old_is_regenerated() -> None:
    world = World(
        config=config(head_deadline_seconds=5.0, head_deadline_action="salvage", max_weight_staleness=3),
        latency=lambda group, rng: 23.0 if (group.feed_index, group.attempt) == ("sample_0_40", 0) else 1.0,
    ).run()
    assert drops(world, DropReason.STALE) == ["sample_0_40"]
    assert world.audit.greatest_age <= 3
    drains = world.trace.of(BatchDrained)
    assert [event.rollout for event in drains] == list(range(40)), "seen as it left the queue"
    assert sum(event.recycled for event in drains) == 1
    assert "sample_0_40" in {feed_index for batch in world.trainer.batches for feed_index in batch}
    assert world.audit.violations == []


def test_a_head_without_tokens_to_continue_is_recycled_and_finally_dead_lettered() -> None:
    """An agent's conversation that is aborted begins again from nothing."""

    class Agents(Engines):
        async def generate(self, group: Group) -> None:
            await super().generate(group)
            if group[0].status is SampleStatus.ABORTED:
                for sample in group:
                    sample.reset()
                    sample.status = SampleStatus.ABORTED

    world = World(
        config=config(head_deadline_seconds=5.0, head_deadline_action="salvage", max_attempts=2),
        latency=stuck(prompt=40, seconds=1e6),
        engine_kind=Agents,
    ).run()
    assert drops(world, DropReason.HEAD_DEADLINE) == ["sample_0_40"] * 2
    assert world.dead_letters.prompts == {"sample_0_40"}
    assert world.audit.violations == []


def test_the_action_wait_leaves_a_slow_head_in_the_queue() -> None:
    world = World(
        config=config(head_deadline_seconds=5.0, head_deadline_action="wait"), latency=stuck(prompt=40, seconds=23.0)
    ).run()
    assert drops(world, DropReason.HEAD_DEADLINE) == []


def test_adaptive_concurrency_keeps_the_engines_full_and_their_lines_short() -> None:
    """A concurrency of 16 under 64 groups: without feedback 48 requests wait inside the engine."""

    def run(adaptive: bool) -> tuple[World, int]:
        settings = config(over_sampling_batch_size=64, rollout_batch_size=16, num_rollout=60)
        world = World(
            config=settings.model_copy(update={"engine": Engine(adaptive_concurrency=adaptive)}),
            latency=lambda group, rng: rng.lognormvariate(0.0, 0.5),
            engines=EngineModel(concurrency=16),
            train_seconds=0.1,
        ).run()
        later = [moved for moved in world.trace.of(GroupMoved) if moved.time > world.seconds / 4]
        return world, max(moved.counts.get("in_flight", 0) for moved in later)

    (fixed, most_fixed), (adaptive, most_adaptive) = run(False), run(True)
    assert most_fixed == 64
    assert most_adaptive <= 32
    assert adaptive.seconds < 1.2 * fixed.seconds
    assert any(event.cause == "engines" for event in adaptive.trace.of(AdmissionBlocked))
    assert adaptive.audit.violations == []
