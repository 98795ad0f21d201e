"""A real engine reports its load for `--adaptive-concurrency`, counts its tokens and answers health checks."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.adapters.weights.engine import read_engine_memory
from miles_async.errors import EngineLostError
from tests.stack.engine_stack import Stack, group_of, start_generating
from tests.waiting import PATIENCE_SECONDS

pytest_plugins = ["tests.stack.engine_fixtures"]


async def test_an_engine_reports_its_cache_usage_while_it_generates(serving: Stack) -> None:
    async with serving.admitted() as (fleet, generator):
        (idle,) = await fleet.loads()
        assert idle.queued == 0
        groups = [group_of(f"What is {n} + 1?", samples=8) for n in range(8)]
        # Returns when the reported usage has risen twice.
        generating = await start_generating(fleet, generator, SamplingParams(max_new_tokens=300), *groups)
        held = []
        while not generating.done():
            (load,) = await fleet.loads()
            held.append(load.held)
            assert idle.kv_usage <= load.kv_usage <= 1
            assert load.queued >= 0
            await asyncio.sleep(0.02)
        await generating
        assert idle.held == 0
        assert max(held) > held[0] > 0


async def test_a_health_check_detects_an_engine_whose_scheduler_hangs(serving: Stack) -> None:
    scheduler = read_engine_memory(serving.engine, timeout=PATIENCE_SECONDS).ranks[0].pid

    async with serving.admitted():
        fleet = SGLangFleet(serving.router_url, router_key=serving.router_key, health_timeout=2.0)
        fleet.register_engine(serving.engine)
        os.kill(scheduler, signal.SIGSTOP)
        try:
            with pytest.raises(EngineLostError, match=r"it generated no token|its scheduler does not answer"):
                await fleet.check("e0")
        finally:
            os.kill(scheduler, signal.SIGCONT)
        await fleet.close()
        patient = SGLangFleet(serving.router_url, router_key=serving.router_key, health_timeout=PATIENCE_SECONDS)
        patient.register_engine(serving.engine)
        await patient.check("e0")
        await patient.close()


async def test_an_engine_counts_the_tokens_of_requests_and_none_while_its_scheduler_hangs(serving: Stack) -> None:
    async def generated() -> int:
        return sum(load.generated for load in await fleet.loads())

    scheduler = read_engine_memory(serving.engine, timeout=PATIENCE_SECONDS).ranks[0].pid
    async with serving.admitted() as (fleet, generator):
        before = await generated()
        for _ in range(3):
            await fleet.check("e0")
        assert await generated() == before
        groups = [group_of(f"What is {n} + 1?", samples=8) for n in range(8)]
        generating = await start_generating(fleet, generator, SamplingParams(max_new_tokens=300), *groups)
        os.kill(scheduler, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.5)
            hangs = await fleet.loads()
            await asyncio.sleep(1.0)
            assert await fleet.loads() == hangs
        finally:
            os.kill(scheduler, signal.SIGCONT)
        await generating
        tokens = sum(sample.response_length for group in groups for sample in group)
        counted = await generated() - before
        assert 0.5 * tokens < counted <= tokens
