"""A run survives configured faults of the parts that it can replace or repeat, also if its rollout worker is killed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from miles_async.events import StepEnded, decode, encode
from miles_async.pipeline.run_ports import Ports
from miles_async.ports import RunStore
from miles_async.stored_run import StoredRun
from tests.configuration import run_config
from tests.sim.lost_workers import SURVIVED_FAULTS, FaultyLostWorkers
from tests.sim.test_lost_workers import check
from tests.sim.test_lost_workers import config as config_of_lost_workers
from tests.sim.test_repair import MortalEngines
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import World
from workers.faults import FaultInjector

ROLLOUTS = 12
RECOVERABLE: list[dict[str, Any]] = [
    {"kind": "delay", "point": "*", "seconds": 20.0},
    {"kind": "error", "point": "generator.generate.*", "times": 3},
    {"kind": "error", "point": "rewarder.score.*"},
    {"kind": "error", "point": "fleet.check.before"},
    {"kind": "error", "point": "fleet.check_router.before", "within": 10},
    {"kind": "error", "point": "fleet.commit.before", "within": 10},
    {"kind": "disk_full", "point": "store.write.before", "times": 20},
    {"kind": "clock_jump", "point": "*", "seconds": 3600.0},
    {"kind": "clock_jump", "point": "*", "seconds": -3600.0},
    {"kind": "poison", "point": "generator.generate.after"},
]


@dataclass(kw_only=True)
class FaultyWorld(World):
    """A simulated run with the faults of its configuration."""

    listed: Path
    """The file that lists the faults that have happened."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine_kind = MortalEngines

    async def _serve(self, clock: VirtualClock, store: RunStore, stored: StoredRun | None) -> None:
        self.injector = FaultInjector(self.config.faults, self.listed, clock)
        await super()._serve(clock, self.injector.port("store", store), stored)

    def _ports(self, clock: VirtualClock) -> Ports:
        return self.injector.ports(super()._ports(clock))


@pytest.mark.parametrize("seed", range(40))
def test_no_group_is_lost_or_trained_twice_under_faults_of_replaceable_parts(seed: int, tmp_path: Path) -> None:
    faults = random.Random(f"which {seed}").sample(RECOVERABLE, 3)
    config = run_config(
        num_rollout=ROLLOUTS,
        rollout_batch_size=8,
        n_samples_per_prompt=2,
        max_weight_staleness=3,
        inject_faults=[{"within": 200, **fault} for fault in faults],
        fault_seed=seed,
    )
    world = FaultyWorld(config=config, listed=tmp_path / "faults.jsonl", seed=seed).run()
    assert world.audit.violations == []
    assert len(world.trace.of(StepEnded)) == ROLLOUTS
    trained = Counter(chain.from_iterable(world.trainer.batches))
    assert set(trained.values()) == {1}
    live = {group.feed_index for group in world.service.lifecycle.live_groups}
    taken = {f"sample_0_{number}" for number in range(world.feed._next)}
    assert taken == set(trained) | live | world.returned | world.dead_letters.prompts
    assert world.listed.exists(), "at least one fault happened"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(20))
def test_rollout_workers_that_are_killed_under_slow_and_failing_calls_lose_no_group(seed: int, tmp_path: Path) -> None:
    faults = random.Random(f"which {seed}").sample(SURVIVED_FAULTS, 3)
    config = config_of_lost_workers(
        save="anywhere",
        save_interval=4,
        inject_faults=[{"within": 200, **fault} for fault in faults],
        fault_seed=seed,
    )
    world = FaultyLostWorkers(config=config, seed=seed, listed=tmp_path / "faults", longest_life=600, kills=6).run()
    check(world)
    assert world.lives > 1


def test_the_event_log_of_a_run_with_rewards_that_are_not_finite_can_be_read(tmp_path: Path) -> None:
    poison = {"kind": "poison", "point": "rewarder.score.after", "call": 3}
    config = run_config(num_rollout=4, rollout_batch_size=4, n_samples_per_prompt=2, inject_faults=[poison])
    world = FaultyWorld(config=config, listed=tmp_path / "faults.jsonl").run()
    assert world.listed.exists(), "the fault happened"
    assert [decode(encode(event)) for event in world.trace.events] == world.trace.events
