"""Engines are killed, hang or stay away under virtual time: the run continues, and no group is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from miles_async.config.schema import RunConfig
from miles_async.errors import EngineLostError, FatalError, RouterLostError
from miles_async.events import AdmissionBlocked, Evaluated, GroupMoved, PublishEnded, StepEnded, WarningRaised
from miles_async.identity import IdentityMap
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, SampleStatus, SendOutcome
from tests.configuration import run_config
from tests.sim.engines import EngineModel, Engines, Latency
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import Trainer, World

START_SECONDS = 12.0
HEALTH_TIMEOUT = 5.0


@dataclass(frozen=True, kw_only=True)
class Fate:
    """Failures of the engines: `(seconds, name)` of each kill and of each hang."""

    engines: int = 2
    kills: Sequence[tuple[float, str]] = ()
    hangs: Sequence[tuple[float, str]] = ()
    never_back: bool = False
    added: Sequence[tuple[float, str]] = ()
    removed: Sequence[tuple[float, str]] = ()


@dataclass(slots=True)
class Server:
    alive: bool = True
    hung: bool = False
    routed: bool = True
    version: int | None = None
    holds: IdentityMap[Group, None] = field(default_factory=IdentityMap)
    """The groups that it is generating, in the order in which they came."""


class MortalEngines(Engines):
    """Requests are distributed evenly over several engines. An engine that dies loses its requests."""

    fate = Fate()

    def __init__(self, clock: VirtualClock, latency: Latency, model: EngineModel, seed: int) -> None:
        super().__init__(clock, latency, model, seed)
        self.servers = {f"engine-{i}": Server() for i in range(self.fate.engines)}
        self.gone: set[str] = set()
        self.starts: list[str] = []
        self.fences: list[float] = []
        """When engines were taken out."""
        loop = asyncio.get_running_loop()
        for at, name in self.fate.kills:
            loop.call_later(at, self._die, name)
        for at, name in self.fate.hangs:
            loop.call_later(at, self._hang, name)
        for at, name in self.fate.added:
            loop.call_later(at, self.servers.__setitem__, name, Server(alive=False, routed=False))
        for at, name in self.fate.removed:
            loop.call_later(at, self._remove, name)

    def _remove(self, name: str) -> None:
        self.gone.add(name)
        self.servers[name].routed = False
        self._die(name)

    def _die(self, name: str) -> None:
        server = self.servers[name]
        server.alive, server.version = False, None
        for ticket in [self._tickets[group] for group in server.holds]:
            self._stop(ticket)
            if not ticket.done.done():
                ticket.done.set_exception(EngineLostError(f"{name} died"))

    def _hang(self, name: str) -> None:
        server = self.servers[name]
        server.hung = True
        for ticket in [self._tickets[group] for group in server.holds]:
            self._stop(ticket)

    async def _serve(self, group: Group, lengths: list[float]) -> tuple[SampleStatus, int | None]:
        routed = [server for server in self.servers.values() if server.routed]
        if not routed:
            raise EngineLostError("the router has no engine")
        server = min(routed, key=lambda each: len(each.holds))
        if not server.alive:
            raise EngineLostError("connection refused")
        self._require_weights(server, group)
        server.holds[group] = None
        try:
            return await super()._serve(group, lengths if not server.hung else [1e9])
        finally:
            del server.holds[group]

    def _require_weights(self, server: Server, group: Group) -> None:
        assert server.version == self.version, "a request reached an engine that does not hold the current weights"

    async def send(self, version: int, engine: str) -> SendOutcome:
        outcome = await super().send(version, engine)
        if not self.servers[engine].alive:
            return SendOutcome(engine=engine, seconds=1.0, bytes=0, error="broke off")
        return outcome

    def members(self) -> Sequence[str]:
        return tuple(name for name in self.servers if name not in self.gone)

    def routed(self) -> Sequence[str]:
        return tuple(name for name, server in self.servers.items() if server.routed)

    async def commit(self, engine: str, version: int) -> None:
        server = self.servers[engine]
        if not server.alive or server.hung:
            raise EngineLostError("no answer")
        server.version = self.version = version

    async def fence(self, engine: str, reason: str) -> None:
        self.servers[engine].routed = False
        self.fences.append(self._clock.monotonic())

    async def admit(self, engine: str) -> None:
        self.servers[engine].routed = True

    async def dismiss(self, engine: str) -> None:
        self._remove(engine)

    async def check(self, engine: str) -> None:
        server = self.servers[engine]
        if server.hung:
            await self._clock.sleep(HEALTH_TIMEOUT)
        if not server.alive or server.hung:
            raise EngineLostError("it drew no token")

    async def restart(self, engine: str) -> None:
        self._die(engine)
        self.starts.append(engine)
        await self._clock.sleep(START_SECONDS)
        if self.fate.never_back:
            raise EngineLostError("no memory for it")
        self.servers[engine] = Server(routed=False)

    async def check_router(self) -> None: ...


def doomed(fate: Fate) -> type[MortalEngines]:
    return type("Doomed", (MortalEngines,), {"fate": fate})


def config(**settings: Any) -> RunConfig:
    sizes = {"rollout_batch_size": 8, "num_rollout": 40, "n_samples_per_prompt": 2, "max_weight_staleness": 3}
    return run_config(**sizes | settings)


def play(fate: Fate, **world: Any) -> World:
    return World(config=config(), engine_kind=doomed(fate), **world).run()


def engines_of(world: World) -> MortalEngines:
    assert isinstance(world.fleet, MortalEngines)
    return world.fleet


def lost(world: World) -> list[str]:
    return [moved.feed_index for moved in world.trace.of(GroupMoved) if moved.reason == DropReason.ENGINE_LOST]


def check_that_all_is_well(world: World) -> None:
    assert len(world.trace.of(StepEnded)) == 40
    assert [event.version for event in world.trace.of(PublishEnded) if event.live] == list(range(41))
    assert world.audit.violations == []
    assert world.dead_letters.letters == []
    trained = {prompt for batch in world.trainer.batches for prompt in batch}
    assert len(trained) == 40 * 8, "no prompt is trained twice"
    owed = {group.feed_index for group in world.service.lifecycle.live_groups} | world.returned
    assert set(lost(world)) <= trained | owed, "no group is lost"


def test_when_one_engine_of_two_dies_its_groups_go_elsewhere_and_it_comes_back() -> None:
    world = play(Fate(kills=[(20.3, "engine-1")]))
    check_that_all_is_well(world)
    assert lost(world)
    assert engines_of(world).starts == ["engine-1"]
    assert set(world.fleet.routed()) == {"engine-0", "engine-1"}


@pytest.mark.parametrize("schedule", list(Schedule))
def test_with_one_engine_the_run_waits_until_it_is_back(schedule: Schedule) -> None:
    undisturbed = World(config=config(), schedule=schedule).run().seconds
    world = play(Fate(engines=1, kills=[(20.3, "engine-0")]), schedule=schedule)
    check_that_all_is_well(world)
    assert undisturbed < world.seconds < undisturbed + START_SECONDS + 12
    if schedule is Schedule.FULLY_ASYNC:
        [wait] = [event.seconds for event in world.trace.of(AdmissionBlocked) if event.cause == "no_engine"]
        assert wait == pytest.approx(START_SECONDS, abs=1)


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_no_group_is_sent_to_a_dead_engine_twice(engines: int) -> None:
    """A dead engine has the fewest requests, so the router prefers it until it is fenced."""
    kind = doomed(Fate(engines=engines, kills=[(2.3, "engine-0")]))
    checked_too_late = config(num_rollout=4, engine_health_interval_seconds=100)
    world = World(config=checked_too_late, engine_kind=kind, train_seconds=10).run()
    assert lost(world)
    assert max(Counter(lost(world)).values()) == 1
    assert engines_of(world).fences == [pytest.approx(2.3, abs=0.1)]
    assert set(world.fleet.routed()) == {f"engine-{i}" for i in range(engines)}


def test_an_engine_that_hangs_is_replaced_after_its_timeout_and_its_groups_are_generated_elsewhere() -> None:
    world = play(Fate(hangs=[(20.3, "engine-0")]))
    check_that_all_is_well(world)
    assert engines_of(world).starts == ["engine-0"]
    assert lost(world)


def test_a_killed_engine_is_noticed_at_the_next_health_check() -> None:
    def fenced_after(interval: float) -> float:
        """While a long step is taken, so that no publish notices it first."""
        settings = config(num_rollout=2, engine_health_interval_seconds=interval)
        fate = Fate(kills=[(22.5, "engine-1")])
        world = World(config=settings, engine_kind=doomed(fate), train_seconds=50).run()
        return engines_of(world).fences[0] - 22.5

    assert fenced_after(1.0) <= 1.0
    assert 1.0 < fenced_after(30.0) <= 30.0


def test_a_publish_that_finds_no_engine_waits_for_one_and_is_announced_once() -> None:
    """The engine dies during a write, where nothing is logged."""
    model = EngineModel(write_seconds=4.0)
    world = play(Fate(engines=1, kills=[(at + 0.1, "engine-0") for at in (30, 60, 90)]), engines=model)
    check_that_all_is_well(world)
    assert not all(event.live for event in world.trace.of(PublishEnded))


def test_an_evaluation_outlives_the_loss_of_the_only_engine() -> None:
    world = play(Fate(engines=1, kills=[(0.5, "engine-0")]), problems=16)
    assert world.trace.of(Evaluated)[0].accuracy == 1.0


def test_a_run_whose_last_engine_cannot_be_started_ends_with_the_cause() -> None:
    fate = Fate(engines=1, kills=[(20.3, "engine-0")], never_back=True)
    with pytest.raises(
        FatalError, match=r"no engine is left: engine engine-0 could not .* \(3 attempts\): no memory for it"
    ):
        play(fate)


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_generates_no_token_after_a_restart_never_joins(engines: int) -> None:
    fate = Fate(engines=engines, kills=[(20.3, "engine-0")])

    class Broken(doomed(fate)):  # type: ignore[misc]
        async def check(self, engine: str) -> None:
            if engine in self.starts:
                raise EngineLostError("its server ended with code 1: AssertionError: assert x.is_cuda")
            await super().check(engine)

    world = World(config=config(), engine_kind=Broken)
    if engines == 1:
        with pytest.raises(FatalError, match=r"could not be replaced \(3 attempts\): its server ended with code 1"):
            world.run()
        return
    check_that_all_is_well(world.run())
    assert world.fleet.routed() == ("engine-1",)


@pytest.mark.parametrize("dies_while_waiting, starts", [(False, 1), (True, 2)])
def test_a_restarted_engine_that_no_router_takes_joins_later_without_another_start(
    dies_while_waiting: bool, starts: int
) -> None:
    restarted_at = 20.3 + START_SECONDS

    class WithoutRouter(doomed(Fate(kills=[(20.3, "engine-1")]))):  # type: ignore[misc]
        refused = 0

        async def admit(self, engine: str) -> None:
            if self._clock.monotonic() < restarted_at + 30:
                self.refused += 1
                if dies_while_waiting and self.refused == 2:
                    self._die(engine)
                raise RouterLostError("connection refused")
            await super().admit(engine)

    world = World(config=config(), engine_kind=WithoutRouter).run()
    check_that_all_is_well(world)
    assert isinstance(world.fleet, WithoutRouter)
    assert world.fleet.refused >= 2
    assert engines_of(world).starts == ["engine-1"] * starts
    assert set(world.fleet.routed()) == {"engine-0", "engine-1"}
    waits = [each.text for each in world.trace.of(WarningRaised) if "waits for the router" in each.text]
    assert len(waits) == starts


def test_an_engine_that_cannot_be_restarted_does_not_end_a_run_that_has_another() -> None:
    world = play(Fate(kills=[(20.3, "engine-1")], never_back=True))
    check_that_all_is_well(world)
    assert world.fleet.routed() == ("engine-0",)


def test_a_colocated_engine_is_restarted_only_while_the_learner_is_off_the_devices() -> None:
    fate = Fate(engines=1, kills=[(20.3, "engine-0"), (60.3, "engine-0"), (100.3, "engine-0")])

    class Sharing(doomed(fate)):  # type: ignore[misc]
        theirs = True
        deaths_in_a_step = 0

        def _die(self, name: str) -> None:
            self.deaths_in_a_step += not self.theirs
            super()._die(name)

        async def offload(self) -> None:
            self.theirs = False

        async def onload(self) -> None:
            self.theirs = True

        async def restart(self, engine: str) -> None:
            assert self.theirs
            await super().restart(engine)
            assert self.theirs

    class Guest(Trainer):
        async def offload(self) -> None: ...

        async def onload(self) -> None: ...

    settings = config(num_rollout=4, colocate=True)
    world = World(
        config=settings, schedule=Schedule.SYNCHRONOUS, engine_kind=Sharing, trainer_kind=Guest, train_seconds=30
    ).run()
    assert len(world.trace.of(StepEnded)) == 4
    assert world.audit.violations == []
    assert isinstance(world.fleet, Sharing)
    assert world.fleet.deaths_in_a_step
    assert len(engines_of(world).starts) == 3


def test_engines_can_be_added_and_removed_while_the_run_goes_on() -> None:
    alone = play(Fate(engines=1))
    world = play(Fate(engines=1, added=[(10, "engine-1"), (10, "engine-2")], removed=[(40.3, "engine-0")]))
    check_that_all_is_well(world)
    assert sorted(engines_of(world).starts) == ["engine-1", "engine-2"], "the removed one is not restarted"
    assert set(world.fleet.routed()) == {"engine-1", "engine-2"}
    assert lost(alone) == []


def kills_of(seed: int) -> list[tuple[float, str]]:
    rng = random.Random(seed)
    return [(rng.uniform(0.1, 90), f"engine-{rng.randrange(3)}") for _ in range(6)]


@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_lost_whichever_process_is_killed_at_any_time(seed: int) -> None:
    kills = kills_of(seed)
    check_that_all_is_well(play(Fate(engines=3, kills=kills[:3], hangs=kills[3:]), seed=seed))
