"""The contract of `ports.Fleet`, for SGLang's fleet over HTTP and for simulated engines that may die."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.ports import Fleet
from tests.contracts.engine import http_engine
from tests.sim.engines import EngineModel
from tests.sim.test_repair import Fate, doomed
from tests.sim.virtual_time import VirtualClock

ENGINE = "engine-0"


@pytest.fixture(params=["real", "simulated"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """A fleet with one engine, which receives requests."""
    if request.param == "simulated":
        yield doomed(Fate(engines=1))(VirtualClock(), lambda group, rng: 1.0, EngineModel(), 0)
        return
    async with http_engine() as engine:
        fleet = SGLangFleet(engine.url)
        fleet.expect_engine(ENGINE)
        fleet.register_engine(EngineInfo(ENGINE, engine.url, 0, 1))
        await fleet.admit(ENGINE)
        yield fleet
        await fleet.close()


async def test_a_fenced_engine_receives_no_requests_until_it_is_admitted(fleet: Fleet) -> None:
    assert (list(fleet.routed()), fleet.serving()) == ([ENGINE], True)
    await fleet.fence(ENGINE, "it holds older weights")
    await fleet.fence(ENGINE, "it holds older weights")
    assert (list(fleet.routed()), fleet.serving()) == ([], False)
    assert list(fleet.members()) == [ENGINE], "it is still an engine of the run"
    assert list(await fleet.loads()) == []
    await fleet.admit(ENGINE)
    assert (list(fleet.routed()), fleet.serving()) == ([ENGINE], True)


async def test_a_version_is_committed_between_pause_and_resume(fleet: Fleet) -> None:
    await fleet.pause("retract")
    await fleet.commit(ENGINE, 1)
    await fleet.resume()
    await fleet.resume()
    await fleet.check(ENGINE)
    assert list(fleet.routed()) == [ENGINE]


async def test_the_load_of_each_routed_engine_is_a_fraction_and_a_count(fleet: Fleet) -> None:
    [load] = await fleet.loads()
    assert 0 <= load.kv_usage <= 1
    assert load.queued >= 0


async def test_the_router_can_be_checked_while_engines_come_and_go(fleet: Fleet) -> None:
    await fleet.check_router()
    assert list(fleet.routed()) == [ENGINE]
    await fleet.fence(ENGINE, "it is replaced")
    await fleet.check_router()
    assert list(fleet.routed()) == []


async def test_a_dismissed_engine_is_no_member_any_more(fleet: Fleet) -> None:
    await fleet.dismiss(ENGINE)
    assert (list(fleet.members()), list(fleet.routed()), fleet.serving()) == ([], [], False)
