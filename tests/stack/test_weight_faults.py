"""Weights are published under load through a channel that loses, tears and refuses writes."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path

from tests.stack.engine_stack import Stack
from tests.stack.weight_faults import publish_under_load

pytest_plugins = ["tests.stack.engine_fixtures"]


async def test_every_token_is_from_the_weights_of_its_span_despite_faulty_writes(
    serving: Stack, tmp_path: Path
) -> None:
    faults = cycle(["lost", None, "slow", "torn", "refused", None, "torn", None, None])
    async with serving.admitted() as (fleet, generator):
        result = await publish_under_load(
            serving,
            fleet,
            generator,
            tmp_path,
            engines=[serving.engine],
            faults=faults,
            publishes=8,
            streams=4,
            new_tokens=120,
        )
    assert {step.then for step in result.steps} == {"retry", "fall_back"}
    assert any("differs from what was sent" in step.error for step in result.steps)
    assert max(len(sample.spans) for sample in result.samples) > 1, "no request lived through a publish"
    errors = result.errors(serving)
    assert len(errors) > 8
    assert max(errors) < 1e-4
    assert not any(math.isnan(error) for error in errors)
