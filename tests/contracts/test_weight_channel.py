"""The contract of `ports.WeightChannel`, for the real channel, the simulator's engines and a run without a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from miles_async.adapters.null import NullLearner
from miles_async.adapters.sglang.launch import EngineInfo
from miles_async.adapters.weights.channel import Channel
from miles_async.ports import WeightChannel
from tests.sim.engines import EngineModel, Engines
from tests.sim.virtual_time import VirtualClock
from tests.unit.adapters.weights.test_weight_channel import TwoSources


def real() -> WeightChannel:
    sources = TwoSources(p2p=0.0, broadcast=0.0)
    return Channel(("p2p", "broadcast"), sources, lambda name: EngineInfo(name, f"http://{name}", 1, 1))


def simulated() -> WeightChannel:
    return Engines(VirtualClock(), lambda group, rng: 1.0, EngineModel(), 0)


pytestmark = [
    pytest.mark.virtual_time,
    pytest.mark.parametrize("create", [real, simulated, NullLearner], ids=["real", "simulated", "no learner"]),
]
Create = Callable[[], WeightChannel]


async def test_each_send_has_the_outcome_of_its_engine(create: Create) -> None:
    channel = create()
    await channel.connect(["b", "a"])
    for version in (1, 2):
        await channel.stage(version)
        outcomes = await asyncio.gather(channel.send(version, "b"), channel.send(version, "a"))
        assert [(outcome.engine, outcome.error) for outcome in outcomes] == [("b", None), ("a", None)]
        assert all(outcome.seconds >= 0 and outcome.bytes >= 0 for outcome in outcomes)


async def test_a_staged_version_can_be_sent_to_an_engine_that_connects_later(create: Create) -> None:
    channel = create()
    await channel.connect(["a"])
    await channel.stage(1)
    await channel.connect(["a", "b"])
    outcome = await channel.send(1, "b")
    assert (outcome.engine, outcome.error) == ("b", None)


async def test_the_transports_of_an_engine_come_to_an_end(create: Create) -> None:
    channel = create()
    await channel.connect(["a"])
    tried = set[str]()
    while (transport := await channel.fall_back("a")) is not None:
        assert transport not in tried
        tried.add(transport)
    assert await channel.fall_back("a") is None
