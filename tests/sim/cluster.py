"""A cluster in the simulator: the real service, with engines, a learner and an event loop as slow as the model says.

The closed form in `cluster_model.py` assumes that a run is as fast as its slowest part. Here the parts wait for each
other. The event loop of the service is the rollout worker's: `VirtualTimeLoop.stop_process` lets the time of a message
pass while nothing else runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from miles_async.config.schema import Observability, Rollout, RunConfig
from miles_async.events import Event, LoopLag, StepEnded, StepStarted
from miles_async.types import Group, SendOutcome, StepReport
from tests.sim.cluster_model import Cluster, Costs, Demand, demand_of
from tests.sim.engines import EngineModel, Engines
from tests.sim.latency import log_normal
from tests.sim.virtual_time import VirtualTimeLoop
from tests.sim.world import Trainer, World

WARM_UP = 3
"""Batches until the run is steady."""
CHECK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The steady part of a simulated run; the columns of `cluster_model.Prediction`."""

    groups_per_second: float
    rollout_worker: float
    learner_waits: float
    staleness: float
    loop_lag: float
    violations: int


class EventLoop:
    """Lets time pass on the event loop while nothing else runs, and counts it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def spend(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.stop_process(seconds)
        self.seconds += seconds


@dataclass
class Tally:
    """Folds the events of the batches after the warm-up."""

    loop: EventLoop
    loop_seconds: float = 0.0
    """Seconds that messages took before the warm-up ended."""
    ends: list[float] = field(default_factory=list)
    worked: float = 0.0
    ages: list[int] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)

    @property
    def is_steady(self) -> bool:
        return len(self.ends) >= WARM_UP

    def emit(self, event: Event) -> None:
        match event:
            case StepEnded():
                self.worked += event.seconds if self.is_steady else 0.0
                self.ends.append(event.time)
                if len(self.ends) == WARM_UP:
                    self.loop_seconds = self.loop.seconds
            case StepStarted() if self.is_steady:
                self.ages += event.staleness
            case LoopLag() if self.is_steady:
                self.lags.append(event.seconds)
            case _:
                pass


def simulate(cluster: Cluster, costs: Costs, *, batches: int, seed: int = 0) -> Simulated:
    """Train `batches` batches and measure those after the first `WARM_UP`."""
    demand, loop = demand_of(cluster, costs), EventLoop()
    tally = Tally(loop)
    world = World(
        config=RunConfig(
            rollout=Rollout(
                num_rollout=batches,
                rollout_batch_size=cluster.batch,
                over_sampling_batch_size=cluster.in_flight,
                n_samples_per_prompt=cluster.group,
                max_weight_staleness=cluster.staleness,
                queue_capacity=10 * cluster.in_flight,
            ),
            observability=Observability(no_progress_abort_seconds=1e9),
        ),
        latency=log_normal(cluster.sample_seconds, cluster.spread),
        engines=EngineModel(
            requests_per_group=cluster.group,
            concurrency=cluster.engines * cluster.streams,
            stage_seconds=demand.stage,
            write_seconds=demand.pause - demand.control,
        ),
        train_seconds=demand.train,
        seed=seed,
        sinks=(tally,),
        keeps_batches=False,
        engine_kind=_engines(demand, loop),
        trainer_kind=_trainer(demand, loop),
    ).run()
    began, ended = tally.ends[WARM_UP - 1], tally.ends[-1]
    seconds, steady = ended - began, batches - WARM_UP
    return Simulated(
        groups_per_second=steady * cluster.batch / seconds,
        rollout_worker=(loop.seconds - tally.loop_seconds) / seconds,
        learner_waits=1 - (tally.worked + steady * demand.stage) / seconds,
        staleness=fmean(tally.ages),
        loop_lag=fmean(tally.lags),
        violations=len(world.audit.violations),
    )


def _engines(demand: Demand, loop: EventLoop) -> type[Engines]:
    """Engines whose messages cost the event loop time."""

    class ClusterEngines(Engines):
        _checks = False

        async def generate(self, group: Group) -> None:
            if not self._checks:
                self._checks = True
                self._check()
            await super().generate(group)
            loop.spend(demand.per_group)

        async def send(self, version: int, engines: Sequence[str]) -> list[SendOutcome]:
            loop.spend(demand.control)
            return await super().send(version, engines)

        def _check(self) -> None:
            loop.spend(demand.background * CHECK_SECONDS)
            asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    return ClusterEngines


def _trainer(demand: Demand, loop: EventLoop) -> type[Trainer]:
    """A learner that gets its batches from the event loop."""

    class ClusterTrainer(Trainer):
        async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
            loop.spend(demand.distribute)
            return await super().train(rollout_id, groups)

    return ClusterTrainer
