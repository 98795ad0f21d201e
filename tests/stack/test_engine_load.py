"""What a real engine says of how full it is; the controller of `--adaptive-concurrency` listens to it."""

from __future__ import annotations

import asyncio

from miles_async.adapters.sglang.fleet import SGLangFleet
from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from tests.stack.engine_stack import Stack, group_of

pytest_plugins = ["tests.stack.engine_fixtures"]


def test_an_engine_tells_how_full_its_cache_is_while_it_generates(serving: Stack) -> None:
    async def story(fleet: SGLangFleet, generator: SGLangGenerator) -> None:
        (idle,) = await fleet.loads()
        assert idle.queued == 0
        groups = [group_of(f"What is {n} + 1?", samples=8) for n in range(8)]
        generating = [
            asyncio.create_task(generator.generate(group, SamplingParams(max_new_tokens=300))) for group in groups
        ]

        async def watch() -> float:
            fullest = 0.0
            while not all(task.done() for task in generating):
                (load,) = await fleet.loads()
                assert 0 <= load.kv_usage <= 1
                assert load.queued >= 0
                fullest = max(fullest, load.kv_usage)
                await asyncio.sleep(0.02)
            return fullest

        fullest = await watch()
        await asyncio.gather(*generating)
        assert fullest > idle.kv_usage

    serving.run(story)
