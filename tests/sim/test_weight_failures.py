"""The publisher repeats a failed weight write, falls back to another transport, and then fences the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from miles_async.errors import FatalError
from miles_async.events import PublishEnded, WriteFailed
from miles_async.observability.metrics.recorder import MetricsRecorder
from miles_async.observability.view import RunView
from miles_async.scheduling.bounds import Schedule
from miles_async.types import SendOutcome
from tests.configuration import run_config
from tests.sim.engines import EngineModel, Engines
from tests.sim.world import World

VERSION = 2
"""The publish in which writes fail."""


@dataclass
class Trouble:
    """Makes writes of one version to one engine fail, and records the reactions."""

    failures: int
    """Writes that fail, from the first one on."""
    transports: list[str] = field(default_factory=lambda: ["broadcast", "disk"])
    """To fall back to."""
    final: bool = False
    attempts: int = 0
    announced: list[tuple[str, int]] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)


def play(trouble: Trouble) -> World:
    class TwoEngines(Engines):
        def routed(self) -> Sequence[str]:
            return [engine for engine in ("good", "bad") if engine not in trouble.fenced]

        async def send(self, version: int, engine: str) -> SendOutcome:
            outcome = await super().send(version, engine)
            if version != VERSION or engine != "bad":
                return outcome
            trouble.attempts += 1
            error = "torn" if trouble.attempts <= trouble.failures else None
            return SendOutcome(engine="bad", seconds=0.1, bytes=1, error=error, final=trouble.final)

        async def fall_back(self, engine: str) -> str | None:
            return trouble.transports.pop(0) if trouble.transports else None

        async def commit(self, engine: str, version: int) -> None:
            trouble.announced.append((engine, version))
            await super().commit(engine, version)

        async def fence(self, engine: str, reason: str) -> None:
            trouble.fenced.append(engine)

    config = run_config(rollout_batch_size=4, num_rollout=4, n_samples_per_prompt=2, max_weight_staleness=3)
    world = World(config=config, schedule=Schedule.FULLY_ASYNC, engine_kind=TwoEngines).run()
    assert world.audit.violations == []
    return world


def steps(world: World) -> list[tuple[str, str | None]]:
    failed = world.trace.of(WriteFailed)
    assert {(event.version, event.engine, event.error) for event in failed} <= {(VERSION, "bad", "torn")}
    return [(event.then, event.transport) for event in failed]


def test_a_torn_write_is_repeated() -> None:
    trouble = Trouble(failures=1)
    world = play(trouble)
    assert steps(world) == [("retry", None)]
    assert ("bad", VERSION) in trouble.announced
    assert trouble.fenced == []


def test_a_write_that_fails_again_uses_another_transport() -> None:
    trouble = Trouble(failures=3)
    world = play(trouble)
    assert steps(world) == [("retry", None), ("fall_back", "broadcast"), ("fall_back", "disk")]
    assert ("bad", VERSION) in trouble.announced
    assert trouble.fenced == []


def test_an_engine_that_no_transport_reaches_is_fenced_and_never_gets_the_version() -> None:
    trouble = Trouble(failures=99)
    world = play(trouble)
    assert steps(world) == [("retry", None), ("fall_back", "broadcast"), ("fall_back", "disk"), ("fence", None)]
    assert ("bad", VERSION) not in trouble.announced
    assert ("good", VERSION) in trouble.announced
    assert [event.fenced for event in world.trace.of(PublishEnded)][VERSION] == ["bad"]


def test_a_write_that_timed_out_is_not_repeated() -> None:
    trouble = Trouble(failures=99, final=True)
    assert steps(play(trouble)) == [("fence", None)]
    assert trouble.attempts == 1


@pytest.mark.parametrize("setting", ["update_weight_timeout_seconds", "engine_health_timeout_seconds"])
def test_a_publish_may_take_as_long_as_the_settings_allow(setting: str) -> None:
    sizes = {"rollout_batch_size": 4, "num_rollout": 2, "n_samples_per_prompt": 2, "max_weight_staleness": 3}
    config = run_config(**sizes, no_progress_abort_seconds=1e6, **{setting: 3000.0})
    world = World(config=config, engines=EngineModel(write_seconds=2900.0)).run()
    assert [event.fenced for event in world.trace.of(PublishEnded)] == [[], [], []]


def test_a_write_that_never_ends_is_named() -> None:
    config = run_config(rollout_batch_size=4, num_rollout=2, n_samples_per_prompt=2, no_progress_abort_seconds=1e6)
    with pytest.raises(FatalError, match="the publish of version 0 has held the staging buffer for 1500 s"):
        World(config=config, engines=EngineModel(write_seconds=1e5)).run()


def test_every_step_is_counted() -> None:
    registry = CollectorRegistry()
    metrics = MetricsRecorder(registry, RunView())
    for event in play(Trouble(failures=99)).trace.of(WriteFailed):
        metrics.observe(event)
    counted = {
        then: registry.get_sample_value("miles_async_weight_write_failures_total", {"then": then})
        for then in ("retry", "fall_back", "fence")
    }
    assert counted == {"retry": 1, "fall_back": 2, "fence": 1}
