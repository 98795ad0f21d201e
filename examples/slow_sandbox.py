"""Tools that take the time of a real sandbox, for comparing schedules on a machine without one.

    --custom-generate-function-path examples.slow_sandbox.generate

The tools are those of `miles_async/rollout/tool_use.py`. Each call of a tool waits first. The waits are log-normal with
a median of half a second, and at most 20 seconds. The seed of the run, the sample and the number of the call decide the
wait, so that two runs with one seed wait equally long. Tools of an evaluation do not wait.
"""

from __future__ import annotations

import asyncio
import random
from math import log
from typing import Any

from miles_async.adapters.sglang.multi_turn import count_observations
from miles_async.rollout import tool_use
from miles_async.types import Sample

MEDIAN_SECONDS = 0.5
SIGMA = 1.2
"""Standard deviation of the logarithm of the seconds. One call in a thousand then takes 20 seconds."""
MOST_SECONDS = 20.0


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Generate a response with at most `tool_max_turns` calls of slow tools."""

    async def run(name: str, text: str) -> str:
        if not evaluation:
            await asyncio.sleep(seconds_of_call(args.rollout_seed, sample.index or 0, count_observations(sample)))
        return tool_use.run_tool(name, text, args.tool_search_corpus)

    return await tool_use.generate_with(run, args, sample, sampling_params)


def seconds_of_call(seed: int, sample: int, call: int) -> float:
    """How long a call of a tool takes."""
    draw = random.Random(f"{seed} {sample} {call}").lognormvariate(log(MEDIAN_SECONDS), SIGMA)
    return min(draw, MOST_SECONDS)
