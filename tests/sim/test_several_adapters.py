"""Several adapters in one run: each has the bound of a run that trains it alone, and none waits for another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import FatalError, UserError
from miles_async.events import GroupMoved, LearnerRestored, PublishEnded, StepStarted
from miles_async.types import Group
from tests.configuration import run_config
from tests.sim.adapters import AdapterEngines, AdapterLostWorkers, AdapterWorld, check_hostile, some_kills
from tests.sim.lost_workers import KILLS_WORKERS

pytestmark = KILLS_WORKERS

BATCH = 8
WEIGHTS = {"math": 2.0, "code": 1.0, "chat": 1.0}


def config_of(rollouts: int, weights: dict[str, float] = WEIGHTS, **settings: Any) -> RunConfig:
    return run_config(
        adapters={name: {"weight": weight} for name, weight in weights.items()},
        datasets={name: {"prompt_data": f"{name}.jsonl", "adapter": name} for name in weights},
        rollout_batch_size=BATCH,
        n_samples_per_prompt=2,
        num_rollout=rollouts,
        **settings,
    )


def mixed(group: Group, rng: random.Random) -> float:
    """The groups of one adapter take ten times as long as those of the others."""
    return rng.lognormvariate(0.0, 1.0) * (10.0 if group.adapter == "chat" else 1.0)


def steps_of(world: AdapterWorld | AdapterLostWorkers) -> Counter[str]:
    return Counter(step.adapter for step in world.trace.of(StepStarted))


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_each_adapter_keeps_the_bounds_of_a_run_of_its_own(seed: int, staleness: int) -> None:
    versions: dict[str, set[int]] = {}

    def keep(group: Group) -> bool:
        versions.setdefault(group.adapter, set()).update(span.version for sample in group for span in sample.spans)
        return True

    config = config_of(40, max_weight_staleness=staleness, over_sampling_batch_size=3 * BATCH)
    world = AdapterWorld(config=config, latency=mixed, keep=keep, seed=seed).run()
    assert world.audit.violations == []
    assert world.audit.greatest_age <= staleness
    assert len(set(chain.from_iterable(versions.values()))) == sum(map(len, versions.values())), (
        "versions are not shared"
    )
    assert all(publish.live and not publish.paused_seconds for publish in world.trace.of(PublishEnded))
    assert set(steps_of(world)) == set(WEIGHTS), "nobody starves"
    assert isinstance(world.fleet, AdapterEngines)
    assert world.fleet.most_resident <= len(WEIGHTS) * (staleness + 2)
    assert world.audit.recycled == 0, "slots suffice, so nothing is thrown away"


def test_shares_follow_the_weights_if_the_learner_is_the_bottleneck() -> None:
    config = config_of(80, max_weight_staleness=2, over_sampling_batch_size=6 * BATCH)
    world = AdapterWorld(config=config, latency=lambda group, rng: 0.1, train_seconds=2.0).run()
    assert world.audit.violations == []
    assert steps_of(world) == {"math": 40, "code": 20, "chat": 20}


def test_shares_follow_the_weights_if_the_engines_are_the_bottleneck() -> None:
    config = config_of(80, max_weight_staleness=2)
    world = AdapterWorld(config=config, latency=lambda group, rng: 1.0, train_seconds=0.01).run()
    assert world.audit.violations == []
    steps = steps_of(world)
    assert abs(steps["math"] - 40) <= 4
    assert abs(steps["code"] - 20) <= 4


def test_an_adapter_whose_groups_take_long_holds_up_no_other() -> None:
    """Its groups hold their slots, and the others go on in the places that are left."""
    config = config_of(30, {"fast": 1.0, "slow": 1.0}, max_weight_staleness=1, over_sampling_batch_size=4 * BATCH)
    latency = lambda group, rng: 1000.0 if group.adapter == "slow" else 1.0  # noqa: E731
    world = AdapterWorld(config=config, latency=latency, train_seconds=0.5).run()
    assert world.audit.violations == []
    assert world.seconds < 1000.0
    assert steps_of(world) == {"fast": 30}


def test_an_adapter_that_is_never_finite_ends_the_run_although_others_are() -> None:
    config = config_of(40, {"good": 1.0, "bad": 1.0}, max_weight_staleness=2, max_nonfinite_batches=3)
    world = AdapterWorld(config=config, latency=lambda group, rng: 1.0)
    world.finite = lambda rollout_id: world.trace.of(StepStarted)[-1].adapter != "bad"
    with pytest.raises(FatalError, match="not finite in 3 batches of adapter bad in a row"):
        world.run()
    assert steps_of(world)["good"] > 0
    assert len(world.dead_letters.letters) == 3 * BATCH


def test_requests_that_name_no_adapter_end_the_run() -> None:
    """Engines answer them with the version that was announced last, whichever adapter it belongs to."""

    class Newest(AdapterEngines):
        def _sampled_by(self, born: int) -> Sequence[int]:
            return (max(self._folder),)

    config = config_of(4, {"one": 1.0, "two": 1.0}, max_weight_staleness=2)
    world = AdapterWorld(config=config, latency=lambda group, rng: 1.0, engine_kind=Newest)
    with pytest.raises(
        UserError, match=r"trains adapter one, but version \d+, which sampled it, is not of this adapter"
    ):
        world.run()


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_while_processes_are_lost_and_loads_fail(seed: int) -> None:
    world = hostile_run(random.Random(f"several adapters {seed}"), seed).run()
    check_hostile(world)
    check_adapters(world)


def hostile_run(rng: random.Random, seed: int) -> AdapterLostWorkers:
    """A run in which engines, rollout workers and learners are killed, and loads fail."""
    config = config_of(
        24,
        {name: rng.choice((1.0, 2.0, 5.0)) for name in ("math", "code", "chat")},
        max_weight_staleness=rng.randint(1, 4),
        over_sampling_batch_size=BATCH * rng.randint(1, 4),
        save="anywhere",
        save_interval=4,
    )
    return AdapterLostWorkers(
        config=config,
        latency=mixed,
        fate=some_kills(rng),
        failing_loads=0.1,
        kills=rng.randint(0, 3),
        learner_kills=rng.randint(0, 3),
        seed=seed,
    )


def check_adapters(world: AdapterLostWorkers) -> None:
    """Each batch trains one adapter, and only adapters of the run are restored."""
    adapters = {move.feed_index: move.adapter for move in world.trace.of(GroupMoved)}
    assert all(len({adapters[name] for name in batch}) == 1 for batch in world.trainer.batches)
    # Another learner, and engines that have started with it, have no version of any adapter.
    restored = [event.adapter for event in world.trace.of(LearnerRestored)]
    assert len(set(Counter(restored).values())) <= 1
    assert {*restored} in (set(), {*world.config.data.adapters})
