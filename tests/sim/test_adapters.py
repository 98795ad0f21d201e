"""Adapters under virtual time: nothing pauses, no group spans versions, and engines hold as many as the bound says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from miles_async.events import PublishEnded, StepStarted, WriteFailed
from miles_async.scheduling.bounds import Schedule
from miles_async.types import Group, SendOutcome
from tests.configuration import run_config
from tests.sim.adapters import AdapterEngines, AdapterLostWorkers, AdapterWorld, check_hostile, some_kills
from tests.sim.lost_workers import KILLS_WORKERS
from tests.sim.world import Trainer

pytestmark = KILLS_WORKERS

ROLLOUTS, BATCH = 20, 8


def slow(group: Group, rng: random.Random) -> float:
    """Some groups take as long as several steps, so that versions are in use for long."""
    return rng.lognormvariate(0.0, 1.5)


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_pauses_and_no_publish_waits_for_a_group(seed: int, staleness: int) -> None:
    versions: list[set[int]] = []

    def keep(group: Group) -> bool:
        versions.append({span.version for sample in group for span in sample.spans})
        return True

    config = run_config(
        rollout_batch_size=BATCH, num_rollout=ROLLOUTS, n_samples_per_prompt=2, max_weight_staleness=staleness
    )
    world = AdapterWorld(config=config, latency=slow, keep=keep, seed=seed).run()
    assert world.audit.violations == []
    assert len(versions) >= ROLLOUTS * BATCH
    assert all(len(one) == 1 for one in versions), "no group spans versions"
    publishes = world.trace.of(PublishEnded)
    assert len(publishes) == ROLLOUTS + 1
    assert all(publish.live and publish.paused_seconds == 0.0 for publish in publishes)
    assert isinstance(world.fleet, AdapterEngines)
    assert world.fleet.most_resident == staleness + 2, "the bound is reached"


def test_requests_name_a_version_after_every_engine_was_compared_with_the_learner() -> None:
    compared: list[tuple[int, int]] = []

    class Compared(AdapterEngines):
        async def compare(self, engine: str) -> str | None:
            compared.append((max(self._folder), max(self.adapters.requests(), default=-1)))
            return None

    world = AdapterWorld(
        config=run_config(rollout_batch_size=BATCH, num_rollout=5, n_samples_per_prompt=2, max_weight_staleness=1),
        latency=slow,
        engine_kind=Compared,
    ).run()
    versions = [publish.version for publish in world.trace.of(PublishEnded)]
    engines = len(world.fleet.routed())
    assert compared == [(version, version - 1) for version in versions for _ in range(engines)]


class Guest(Trainer):
    """A learner that shares devices with the engines."""

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


def colocated(engines: type[AdapterEngines], interval: int) -> AdapterWorld:
    """A run of six steps on devices that learner and engines share, with a publish every `interval` steps."""
    world = AdapterWorld(
        config=run_config(
            rollout_batch_size=BATCH,
            num_rollout=6,
            n_samples_per_prompt=2,
            colocate=True,
            update_weights_interval=interval,
        ),
        schedule=Schedule.SYNCHRONOUS,
        latency=slow,
        engine_kind=engines,
        trainer_kind=Guest,
    ).run()
    assert world.audit.violations == []
    assert len(world.trace.of(StepStarted)) == 6
    return world


@pytest.mark.parametrize("interval", [1, 2])
def test_engines_that_share_devices_hold_what_requests_name_although_they_lose_their_adapters_in_each_step(
    interval: int,
) -> None:
    class Forgetful(AdapterEngines):
        async def offload(self) -> None:
            assert self.in_flight == 0
            self._held = {name: set() for name in self._held}

        async def onload(self) -> None: ...

    world = colocated(Forgetful, interval)
    assert len(world.trace.of(PublishEnded)) == 1 + 6 // interval


def test_an_engine_that_does_not_hold_its_adapter_after_a_step_is_replaced() -> None:
    class Damaged(AdapterEngines):
        waits_for_nothing = False
        """The new engine loads older versions too, which only the next publish drops."""
        steps = 0

        async def offload(self) -> None:
            self.steps += 1

        async def onload(self) -> None: ...

        async def send(self, version: int, engine: str) -> SendOutcome:
            outcome = await super().send(version, engine)
            is_damaged = self.steps == 2 and engine == "engine-0" and not self.starts
            return replace(outcome, error="not restored") if is_damaged else outcome

    world = colocated(Damaged, 3)
    failures = [(failure.engine, failure.then) for failure in world.trace.of(WriteFailed)]
    assert failures == [("engine-0", "retry"), ("engine-0", "fence")]
    assert isinstance(world.fleet, AdapterEngines)
    assert world.fleet.starts == ["engine-0"]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("seed", range(10))
def test_engines_hold_what_requests_name_while_processes_are_lost_and_loads_fail(seed: int, schedule: Schedule) -> None:
    check_hostile(hostile_run(random.Random(f"adapters {seed}"), schedule, seed).run())


def hostile_run(rng: random.Random, schedule: Schedule, seed: int) -> AdapterLostWorkers:
    """A run in which engines, rollout workers and learners are killed, and loads fail."""
    config = run_config(
        rollout_batch_size=BATCH,
        num_rollout=ROLLOUTS,
        n_samples_per_prompt=2,
        max_weight_staleness=rng.randint(1, 4),
        save="anywhere",
        save_interval=4,
    )
    return AdapterLostWorkers(
        config=config,
        schedule=schedule,
        latency=slow,
        fate=some_kills(rng),
        failing_loads=0.1,
        kills=2,
        learner_kills=2,
        problems=rng.choice((0, 20)),
        seed=seed,
    )
