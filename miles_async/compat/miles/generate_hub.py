"""Miles' generate functions, for functions of users that call them.

A setting that names one of them names a function of this project instead (`resolution.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from miles_async.compat.miles import agents, multi_turn
from miles_async.compat.miles.base_types import GenerateFnInput, GenerateFnOutput


def _takes_input(function: Callable[..., Awaitable[Any]]) -> Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]:
    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        return GenerateFnOutput(await function(input.args, input.sample, input.sampling_params))

    return generate


FUNCTIONS: Mapping[str, Callable[[GenerateFnInput], Awaitable[GenerateFnOutput]]] = {
    "agentic_tool_call": _takes_input(agents.generate),
    "multi_turn": _takes_input(multi_turn.generate),
    "single_turn": _takes_input(lambda args, sample, sampling_params: args.turns.sample(sample, sampling_params)),
}
"""The function `generate` of each module of Miles' `generate_hub`."""
