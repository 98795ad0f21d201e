"""The router does not answer for a while: admission and evaluations wait, and nobody is charged for it."""

from __future__ import annotations

import asyncio

import pytest

from miles_async.errors import EngineLostError, RouterLostError
from miles_async.events import AdmissionBlocked, Evaluated, GroupMoved, StepEnded
from miles_async.scheduling.bounds import Schedule
from miles_async.types import DropReason, Group, SampleStatus
from tests.configuration import run_config
from tests.sim.engines import EngineModel, Engines, Latency
from tests.sim.virtual_time import VirtualClock
from tests.sim.world import World


class RouterDown(Engines):
    """The router is gone for `seconds`, from `begins` on; the next health check notices."""

    begins = 10.2
    seconds = 12.0

    def __init__(self, clock: VirtualClock, latency: Latency, model: EngineModel, seed: int) -> None:
        super().__init__(clock, latency, model, seed)
        self.seen_down = False
        asyncio.get_running_loop().call_later(self.begins, self._end_all)

    @property
    def _down(self) -> bool:
        return self.begins <= self._clock.monotonic() < self.begins + self.seconds

    def _end_all(self) -> None:
        for ticket in self._tickets.values():
            self._stop(ticket)
            if not ticket.done.done():
                ticket.done.set_exception(RouterLostError("the router closed the connection"))

    async def _serve(self, group: Group, lengths: list[float]) -> tuple[SampleStatus, int | None]:
        if self._down:
            raise RouterLostError("connection refused")
        return await super()._serve(group, lengths)

    def members(self) -> tuple[str, ...]:
        return ("engine-0",)

    async def check(self, engine: str) -> None: ...

    def serving(self) -> bool:
        return not self.seen_down

    async def check_router(self) -> None:
        self.seen_down = self._down
        if self._down:
            raise EngineLostError("the router does not answer")


def play(
    seconds: float, *, begins: float = 10.2, schedule: Schedule = Schedule.FULLY_ASYNC, problems: int = 0
) -> World:
    config = run_config(rollout_batch_size=8, num_rollout=40, n_samples_per_prompt=2, max_weight_staleness=3)
    engines = type("RouterDownFor", (RouterDown,), {"seconds": seconds, "begins": begins})
    return World(config=config, schedule=schedule, engine_kind=engines, problems=problems).run()


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("seconds", [12.0, 120.0])
def test_no_prompt_is_charged_for_an_outage_of_the_router(seconds: float, schedule: Schedule) -> None:
    world = play(seconds, schedule=schedule)
    assert len(world.trace.of(StepEnded)) == 40
    assert world.dead_letters.letters == []
    assert world.audit.violations == []
    moves = world.trace.of(GroupMoved)
    assert {move.attempt for move in moves} == {0}
    dropped = [move for move in moves if move.reason == DropReason.ROUTER_LOST]
    assert 0 < len(dropped) <= 4 * world.bounds.generation_batch, "admission waits for the router"


def test_admission_names_the_outage_as_its_cause() -> None:
    waits = [event.seconds for event in play(60.0).trace.of(AdmissionBlocked) if event.cause == "no_engine"]
    assert sum(waits) == pytest.approx(60, abs=3)


@pytest.mark.parametrize("begins", [0.0, 1.0])
@pytest.mark.parametrize("seconds", [12.0, 120.0])
def test_an_evaluation_waits_until_the_router_is_back(seconds: float, begins: float) -> None:
    world = play(seconds, begins=begins, problems=16)
    assert [event.accuracy for event in world.trace.of(Evaluated)] == [1.0, 1.0]
    assert world.trace.of(Evaluated)[0].seconds > seconds - 1
