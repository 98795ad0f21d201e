"""The contracts of `ports.Generator` and `ports.Fleet` (`tests/contracts`), on a real engine and a real router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.adapters.sglang.tokenizer import CheckpointTokenizer
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from tests.configuration import run_config
from tests.contracts import test_fleet as of_fleets
from tests.contracts import test_generator as of_generators
from tests.contracts.engine import WEIGHTS
from tests.contracts.test_generator import Case, one_turn
from tests.stack.engine_stack import Stack

pytest_plugins = ["tests.stack.engine_fixtures"]

SHORT = SamplingParams(max_new_tokens=9)
LONG = SamplingParams(max_new_tokens=480, other={"ignore_eos": True})
"""A response that an abort ends long before its length does."""

# Pytest runs the tests of a contract here with the fixtures of this file.
globals().update({name: test for name, test in vars(of_generators).items() if name.startswith("test_")})
globals().update({name: test for name, test in vars(of_fleets).items() if name.startswith("test_")})


@pytest.fixture
async def fleet(serving: Stack) -> AsyncIterator[SGLangFleet]:
    """A fleet with one engine, which receives requests."""
    async with serving.admitted() as (first, _):
        # Another fleet knows the engine by the name that the contract uses.
        await first.fence(serving.engine.name, "the contract names it")
        fleet = SGLangFleet(serving.router_url, router_key=serving.router_key)
        fleet.expect_engine(of_fleets.ENGINE)
        fleet.register_engine(replace(serving.engine, name=of_fleets.ENGINE))
        await fleet.admit(of_fleets.ENGINE)
        yield fleet
        await fleet.resume()
        await fleet.fence(of_fleets.ENGINE, "the test has ended")
        await fleet.close()


async def test_an_engine_that_another_rollout_worker_left_paused_generates_again(
    fleet: SGLangFleet, serving: Stack
) -> None:
    await fleet.pause("retract")
    successor = SGLangFleet(serving.router_url, router_key=serving.router_key, health_timeout=10)
    successor.register_engine(fleet.address(of_fleets.ENGINE))
    await successor.take_over(of_fleets.ENGINE)
    await successor.check(of_fleets.ENGINE)
    assert successor.serving()
    await successor.close()


@pytest.fixture(params=["sglang", "function"])
async def case(request: pytest.FixtureRequest, serving: Stack) -> AsyncIterator[Case]:
    async with serving.admitted() as (fleet, generator):
        await fleet.commit(serving.engine.name, WEIGHTS)
        generator.sampling = SHORT
        if request.param == "sglang":
            yield Case(generator, lambda held: setattr(generator, "sampling", LONG if held else SHORT))
        else:
            yield function_case(generator, CheckpointTokenizer(str(serving.checkpoint)))


def function_case(engine: SGLangGenerator, tokenizer: CheckpointTokenizer) -> Case:
    turns = MultiTurnSampler(engine, tokenizer)
    generator = FunctionGenerator(
        one_turn,
        flat_args(run_config()).with_values(turns=turns),
        SHORT,
        engine,
        turns,
        live_version=lambda: WEIGHTS,
        timeout_seconds=60.0,
        max_attempts=1,
    )
    return Case(generator, lambda held: setattr(generator, "_sampling", LONG if held else SHORT))
