"""Simulated engines that hold versions of an adapter, beside the loss of engines, rollout workers and learners."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from miles_async.events import StepStarted
from miles_async.identity import IdentityMap
from miles_async.pipeline.run_ports import Ports
from miles_async.scheduling.adapters import AdapterVersions, PinnedVersion
from miles_async.scheduling.lineage import Lineage
from miles_async.types import Group, SampleStatus, SendOutcome
from tests.sim.lost_workers import LastingEngines, LostWorkers
from tests.sim.test_repair import Fate, MortalEngines, Server
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import World


class AdapterEngines(MortalEngines):
    """Each request names a version, which its engine must hold from its beginning to its end."""

    failing_loads = 0.0
    """Fraction of the loads that fail."""
    waits_for_nothing = True
    """Whether no publish may find a request that names a version which engines are about to drop."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.adapters: AdapterVersions
        self.resident = 0
        """The bound (`AdapterVersions.resident`)."""
        self.most_resident = 0
        self._folders: dict[str, set[int]] = {}
        """The versions of each adapter that engines may load."""
        self._named: IdentityMap[Group, int] = IdentityMap()
        self._held: dict[str, set[int]] = {name: set() for name in self.servers}
        self._loads = random.Random("loads")

    async def _serve(self, group: Group, lengths: list[float]) -> tuple[SampleStatus, int | None]:
        adapters = self.adapters
        pin = PinnedVersion(max((span.version for sample in group for span in sample.spans), default=None))
        version = self._named[group] = adapters.begin(pin, group.adapter)
        try:
            status, born = await super()._serve(group, lengths)
        finally:
            adapters.end(version, group.adapter)
            del self._named[group]
        return status, None if born is None else version

    def _sampled_by(self, born: int) -> Sequence[int]:
        return (born,)

    def _require_weights(self, server: Server, group: Group) -> None:
        name = next(name for name, one in self.servers.items() if one is server)
        assert self._named[group] in self._held[name], "a request names a version that its engine lacks"

    @property
    def _folder(self) -> set[int]:
        return set().union(*self._folders.values())

    async def stage(self, version: int, adapter: str = "", lineage: Lineage | None = None) -> None:
        await super().stage(version, adapter, lineage)
        older = sorted(old for old in self._folders.get(adapter, ()) if old < version)
        self._folders[adapter] = {*older[1 - self.adapters.resident :], version}
        if self.waits_for_nothing:
            assert self.adapters.idle(adapter), "a publish would wait for a request"

    async def send(self, version: int, engine: str) -> SendOutcome:
        outcome = await super().send(version, engine)
        if outcome.error is None and self._loads.random() < self.failing_loads:
            return replace(outcome, error="refused")
        if outcome.error is None:
            held = self._held.setdefault(engine, set())
            assert held <= self._folder or not self.waits_for_nothing, "old versions are left after a publish"
            self._keep(engine, self._folder)
            held |= self._folder
            self.most_resident = max(self.most_resident, len(held))
            assert len(held) <= self.resident * len(self._folders)
            assert all(len(own & held) <= self.resident for own in self._folders.values())
        return outcome

    async def drop(self, engine: str) -> None:
        self._keep(engine, set().union(*(sorted(own)[1 - self.adapters.resident :] for own in self._folders.values())))

    def _keep(self, engine: str, versions: set[int]) -> None:
        in_use = {self._named[group] for group in self.servers[engine].holds}
        assert not (self._held[engine] - versions) & in_use, "an engine drops a version that a request names"
        self._held[engine] &= versions

    async def pause(self, mode: str) -> None:
        raise AssertionError("nothing pauses")

    async def restart(self, engine: str) -> None:
        self._held[engine] = set()
        await super().restart(engine)


@dataclass(kw_only=True)
class AdapterWorld(World):
    """A run that trains an adapter."""

    engine_kind: type[AdapterEngines] = AdapterEngines

    def _ports(self, clock: VirtualClock) -> Ports:
        return with_adapters(self, super()._ports(clock))


@dataclass(kw_only=True)
class AdapterLostWorkers(LostWorkers):
    """The same; engines, rollout workers and learners are killed, and loads fail."""

    fate: Fate = field(default_factory=Fate)
    failing_loads: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Continued groups, and those of a learner that was rolled back, may be older than the proof allows.
        own = {"fate": self.fate, "failing_loads": self.failing_loads, "waits_for_nothing": False}
        self.engine_kind = type("MortalAdapterEngines", (AdapterEngines, LastingEngines), own)

    def _ports(self, clock: VirtualClock) -> Ports:
        return with_adapters(self, super()._ports(clock))


def with_adapters(world: World, ports: Ports) -> Ports:
    """The ports of a run with an adapter."""
    assert isinstance(world.fleet, AdapterEngines)
    assert world.bounds.staleness is not None
    world.fleet.adapters = AdapterVersions(world.bounds.staleness, world.config.data.adapter_weights)
    world.fleet.resident = world.fleet.adapters.resident
    return replace(ports, adapters=world.fleet.adapters)


def some_kills(rng: random.Random) -> Fate:
    """Kill one of two engines three times in the first minute."""
    return Fate(kills=[(rng.uniform(0, 60), f"engine-{rng.randrange(2)}") for _ in range(3)])


def check_hostile(world: AdapterLostWorkers) -> None:
    """The engines assert at each load, request and drop that they hold what they must, and no more than the bound."""
    assert world.audit.violations == []
    trained = Counter(chain.from_iterable(world.trainer.batches))
    assert set(trained.values()) == {1}, "no prompt is trained twice"
    assert len(world.trainer.batches) == world.config.rollout.num_rollout
    limit = world.config.rollout.max_weight_staleness
    assert limit is not None
    assert all(age <= limit for step in world.trace.of(StepStarted) for age in step.staleness)
