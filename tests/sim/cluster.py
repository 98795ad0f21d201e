"""A cluster in the simulator: the real service, with engines, a learner and an event loop as slow as the model says.

The closed form in `cluster_model.py` assumes that a run is as fast as its slowest part. Here the parts wait for each
other. The event loop of the service is the rollout worker's: `VirtualTimeLoop.stop_process` lets the time of a message
pass while nothing else runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from miles_async.config.schema import Observability, Rollout, RunConfig
from miles_async.events import Event, LoopLag, StepEnded, StepStarted
from miles_async.types import Group, SendOutcome, StepReport
from tests.sim.cluster_model import LONGEST, MODELS, Cluster, Costs, Demand, Prediction, demand_of
from tests.sim.engines import EngineModel, Engines
from tests.sim.latency import log_normal
from tests.sim.virtual_time import VirtualTimeLoop
from tests.sim.world import Trainer, World

SCALES = {
    f"{model}, {gpus:,} GPUs": Cluster(gpus=gpus, model=size)
    for model, size in MODELS.items()
    for gpus in (8, 64, 512, 4096)
    if Cluster(gpus=gpus, model=size).ranks >= size.replica_ranks
}
"""The reference job on every cluster that it fits on."""
_MEDIUM, _LARGE = Cluster(gpus=512), Cluster(gpus=4096)
SENSITIVITIES = {
    "512 GPUs, 4B, 8,192 tokens, groups of 16": _MEDIUM,
    "512 tokens": replace(_MEDIUM, response=512),
    "2,048 tokens": replace(_MEDIUM, response=2048),
    "32,768 tokens": replace(_MEDIUM, response=32_768),
    "groups of 4": replace(_MEDIUM, group=4),
    "groups of 64": replace(_MEDIUM, group=64),
    "agents of 10 turns": replace(_MEDIUM, turns=10),
    "agents of 50 turns": replace(_MEDIUM, turns=50),
    "batches of 512 groups, staleness 30": replace(_MEDIUM, batch_groups=512, staleness=30),
    "health checks every 10 s": replace(_MEDIUM, health_interval=10.0),
    "2 rollout workers": replace(_MEDIUM, workers=2),
    "8 rollout workers": replace(_MEDIUM, workers=8),
}
"""One change each of the job on 512 GPUs."""
_CHECKED = replace(_LARGE, health_interval=10.0)
_WIDE = replace(_CHECKED, streams=512, model=replace(MODELS["4B"], engine_gpus=4))
KNOBS = {
    "4,096 GPUs, 4B": _LARGE,
    "health checks every 10 s": _CHECKED,
    "and engines of 4 GPUs": _WIDE,
    "and 8 rollout workers": replace(_WIDE, workers=8),
    "and 32 rollout workers": replace(_WIDE, workers=32),
}
"""One change after the other on 4,096 GPUs."""
CHECKS = {
    "8 GPUs": Cluster(gpus=8),
    "8 GPUs, staleness 2": Cluster(gpus=8, staleness=2),
    "64 GPUs": Cluster(gpus=64),
    "64 GPUs, half of them generate": Cluster(gpus=64, engine_share=0.5),
    "64 GPUs, agents of 50 turns": Cluster(gpus=64, turns=50),
}
"""Runs that the simulator plays; another part limits each of them, except the third."""
BATCHES, WARM_UP = 9, 3
"""Batches of a simulated run, and of these until it is steady."""
TOLERANCE = 0.15
"""Of groups per second, relative. The model is optimistic, most of all where slots limit a run: all slots of a batch
become free at once, and the engines then have a burst of work."""
CHECK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The steady part of a simulated run; the columns of `cluster_model.Prediction`."""

    groups_per_second: float
    rollout_worker: float
    learner_waits: float
    staleness: float
    loop_lag: float
    """How late a callback that is due at any moment runs, on average."""
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
    ends: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    """Seconds that messages had taken at the end of each step."""
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
                self.spent.append(self.loop.seconds)
            case StepStarted() if self.is_steady:
                self.ages += event.staleness
            case LoopLag() if self.is_steady:
                self.lags.append(event.seconds)
            case _:
                pass


def simulate(cluster: Cluster, costs: Costs, *, batches: int = BATCHES, seed: int = 0) -> Simulated:
    """Train `batches` batches and measure those after the first `WARM_UP`."""
    demand, loop = demand_of(cluster, costs), EventLoop()
    tally = Tally(loop)
    length = log_normal(cluster.sample_seconds, cluster.spread)
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
        latency=lambda group, rng: min(LONGEST * cluster.sample_seconds, length(group, rng)),
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
        rollout_worker=(tally.spent[-1] - tally.spent[WARM_UP - 1]) / seconds,
        learner_waits=1 - (tally.worked + steady * demand.stage) / seconds,
        staleness=fmean(tally.ages),
        loop_lag=sum(lag**2 for lag in tally.lags) / (2 * seconds),
        violations=len(world.audit.violations),
    )


def disagreements(pairs: Mapping[str, tuple[Prediction, Simulated]]) -> list[str]:
    """Sentences about runs in which the model and the simulator differ by more than `TOLERANCE`."""
    sentences = []
    for name, (predicted, simulated) in pairs.items():
        ratio = simulated.groups_per_second / predicted.groups_per_second
        if abs(ratio - 1) > TOLERANCE:
            sentences.append(f"{name}: the simulator makes {ratio:.2f} times the groups per second of the model")
        if simulated.violations:
            sentences.append(f"{name}: the audit found {simulated.violations} violations")
    return sentences


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

        async def send(self, version: int, engine: str) -> SendOutcome:
            loop.spend(demand.control)
            return await super().send(version, engine)

        def _check(self) -> None:
            loop.spend(demand.background * CHECK_SECONDS)
            asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)

    return ClusterEngines


def _trainer(demand: Demand, loop: EventLoop) -> type[Trainer]:
    """A learner that gets its batches from the event loop."""

    class ClusterTrainer(Trainer):
        def pack(self, groups: Sequence[Group]) -> None:
            super().pack(groups)
            loop.spend(demand.distribute)

        async def train(self, rollout_id: int, groups: Sequence[Group]) -> StepReport:
            if not self.was_packed(groups):
                loop.spend(demand.distribute)
            return await super().train(rollout_id, groups)

    return ClusterTrainer
