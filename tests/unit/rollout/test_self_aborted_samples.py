"""Generate functions that return a sample with status ABORTED although the run did not abort it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_async.adapters.sglang.generator import SamplingParams, SGLangGenerator
from miles_async.adapters.sglang.multi_turn import MultiTurnSampler
from miles_async.config.schema import RunConfig
from miles_async.errors import TrajectoryError
from miles_async.rollout.contract import flat_args
from miles_async.rollout.generate import FunctionGenerator
from miles_async.scheduling.adapters import PinnedVersion
from miles_async.types import Group, Sample, SampleStatus
from tests.unit.byte_tokenizer import Bytes


class AbortingEngine(SGLangGenerator):
    """An engine that aborts every request, as engines do when weights are published with mode `abort`."""

    async def generate(
        self, group: Group, sampling: SamplingParams | None = None, pin: PinnedVersion | None = None
    ) -> None:
        for sample in group:
            sample.status = SampleStatus.ABORTED


def generate(function: Any, *, engines_abort: bool = False) -> Group:
    async def story() -> Group:
        tokenizer = Bytes()
        sampling = SamplingParams(max_new_tokens=9)
        engine = AbortingEngine("http://127.0.0.1:1", tokenizer, sampling, limit=lambda: 4, engines=list)
        turns = MultiTurnSampler(engine, tokenizer)
        generator = FunctionGenerator(
            function,
            flat_args(RunConfig()).with_values(turns=turns),
            sampling,
            engine,
            turns,
            live_version=lambda: 0,
            timeout_seconds=5.0,
            max_attempts=3,
            engines_abort=engines_abort,
        )
        group = Group([Sample(index=3, prompt="Q")], feed_index="sample_0_0")
        try:
            await generator.generate(group)
        finally:
            await engine.close()
        return group

    return asyncio.run(story())


async def give_up(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.status = SampleStatus.ABORTED
    return sample


async def sample_one_turn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return await args.turns.sample(sample, sampling_params)


def test_a_sample_that_the_function_aborts_itself_is_a_failed_attempt() -> None:
    with pytest.raises(TrajectoryError, match=r"sample 3: .* returned status ABORTED, but the run did not abort it"):
        generate(give_up)


def test_a_sample_whose_turn_the_engine_aborted_is_not_a_failed_attempt() -> None:
    assert generate(sample_one_turn)[0].status is SampleStatus.ABORTED


def test_engines_that_abort_requests_at_each_publish_cost_no_attempt() -> None:
    assert generate(give_up, engines_abort=True)[0].status is SampleStatus.ABORTED
