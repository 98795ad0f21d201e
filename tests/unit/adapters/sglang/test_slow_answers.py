"""An answer that takes longer than the time limit is a failed attempt, not the loss of an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.errors import TrajectoryError
from miles_async.types import Group, Sample
from tests.configuration import run_config
from tests.unit.adapters.sglang.test_router_outage import NoTokenizer, router
from workers.specs import router_spec


async def test_a_slow_answer_does_not_count_as_a_lost_engine_and_the_error_names_the_setting() -> None:
    never = asyncio.Event()

    async def hangs(request: web.Request) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    async with router(hangs) as url:
        generator = SGLangGenerator(
            url,
            NoTokenizer(),
            SamplingParams(max_new_tokens=4),
            limit=lambda: 4,
            engines=lambda: (),
            request_timeout=0.05,
        )
        with pytest.raises(TrajectoryError, match="raise sglang_router_request_timeout_secs"):
            await generator.generate(Group([Sample(tokens=[1, 2])]))
        await generator.close()
        never.set()


def test_the_router_gives_up_a_request_later_than_the_client() -> None:
    """The router reports its own time limit as a failed engine."""
    config = run_config()
    assert router_spec(config, Path()).request_timeout > config.engine.sglang_router_request_timeout_secs >= 3600
