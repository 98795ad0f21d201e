"""Engine and learner agree on the log-probabilities of tokens that were sampled with top-p and top-k."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_async.adapters.sglang.generator import SamplingParams
from miles_async.batching.batch import rank_batches
from miles_async.errors import TrajectoryError
from miles_async.types import Group, SampleStatus
from tests.configuration import run_config
from tests.stack.engine_stack import Stack, group_of, start_generating, tokens_drawn
from tests.stack.learning import learning
from workers.specs import sampling_of

pytest_plugins = ["tests.stack.engine_fixtures"]

LIMITED: dict[str, Any] = {"rollout_temperature": 0.7, "rollout_top_p": 0.9}
COUNTS = {"top_p": (1, 320), "top_p and top_k": (1, 20)}
SETTINGS = {"top_p": LIMITED, "top_p and top_k": LIMITED | {"rollout_top_k": 20}}


def gap(checkpoint: Path, group: Group, **settings: Any) -> float:
    """Largest difference between the engine's log-probabilities and the learner's."""
    run = run_config(**settings, max_tokens_per_gpu=2000, num_steps_per_rollout=2)
    for index, sample in enumerate(group):
        sample.index, sample.reward = index, float(index)
    with learning(checkpoint, run) as learner:
        [steps] = rank_batches([group], run, 1)
        report = learner.train(0, steps)
    assert report.finite
    assert report.metrics["entropy"] > 0
    return report.metrics["logprob_gap_max"]


@pytest.mark.parametrize("name", SETTINGS)
async def test_engine_and_learner_agree_on_limited_sampling(serving: Stack, checkpoint: Path, name: str) -> None:
    torch.set_num_threads(1)
    sampling = sampling_of(run_config(**SETTINGS[name], rollout_max_response_len=60))
    async with serving.admitted(sampling_masks=True) as (_, generator):
        group = group_of("What is 12 + 34?", samples=4)
        await generator.generate(group, sampling)
    low, high = COUNTS[name]
    for sample in group:
        assert sample.sampling_mask is not None
        assert len(sample.sampling_mask) == sample.response_length
        assert low <= sample.sampling_mask.counts.min() <= sample.sampling_mask.counts.max() <= high
        assert serving.error(sample, temperature=0.7) < 1e-4
    assert gap(checkpoint, group, **SETTINGS[name]) < 1e-4


async def test_they_agree_across_publishes_in_mid_answer(serving: Stack, checkpoint: Path) -> None:
    sampling = sampling_of(run_config(**SETTINGS["top_p and top_k"], rollout_max_response_len=380))
    async with serving.admitted(sampling_masks=True) as (fleet, generator):
        group = group_of(list(range(50)), samples=4)

        async def publish(mode: str) -> None:
            await fleet.pause(mode)
            await fleet.commit("e0", next(serving.versions))
            await fleet.resume()

        async def generate_and_publish(mode: str) -> asyncio.Task[None]:
            running = await start_generating(fleet, generator, sampling, group)
            await publish(mode)
            return running

        running = await generate_and_publish("retract")
        while not await tokens_drawn(fleet, running):
            group.reset()
            running = await generate_and_publish("retract")
        await publish("in_place")
        await running
    assert all(sample.status is not SampleStatus.ABORTED for sample in group)
    assert max(len(sample.spans) for sample in group) == 3
    assert gap(checkpoint, group, **SETTINGS["top_p and top_k"]) < 1e-4


async def test_aborted_samples_are_continued_with_their_masks(serving: Stack, checkpoint: Path) -> None:
    sampling = sampling_of(run_config(**SETTINGS["top_p and top_k"], rollout_max_response_len=200))
    async with serving.admitted(sampling_masks=True) as (fleet, generator):
        group = group_of(list(range(60)), samples=4)
        running = await start_generating(fleet, generator, sampling, group)
        await generator.abort()
        await running
        await serving.commit_when_idle(fleet)
        await generator.generate(group, sampling)
    for sample in group:
        assert sample.sampling_mask is not None
        assert len(sample.sampling_mask) == sample.response_length
        assert serving.error(sample, temperature=0.7) < 1e-4


async def test_an_engine_that_returns_no_mask_fails_the_trajectory(serving: Stack) -> None:
    """SGLang returns none without top-k."""
    async with serving.admitted(sampling_masks=True) as (_, generator):
        with pytest.raises(TrajectoryError, match="the engine returned no sampling mask"):
            await generator.generate(group_of("1 + 1 ="), SamplingParams(max_new_tokens=4, top_p=0.9))
