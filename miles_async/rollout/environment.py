"""Generates samples in an environment of `verifiers` or `openenv`, which also computes their rewards.

    --environment verifiers:my_taskset \
        --custom-generate-function-path miles_async.rollout.environment.generate \
        --custom-rm-path miles_async.rollout.environment.reward

The environment runs in a separate process and reaches the model over the endpoint of the run, so the trained tokens
are the sampled ones. If the environment fails, the sample is generated again; it never gets a reward of 0 instead.
"""

from __future__ import annotations

from typing import Any

from miles_async.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Run the task of the sample; `metadata["environment"]` has its reward and its metrics."""
    async with args.agents.session(sample, sampling_params) as base_url:
        sample.metadata["environment"] = await args.environment_process.run(sample.metadata["task"], base_url)
    return sample


def reward(args: Any, sample: Sample) -> Any:
    """Return the reward that the environment has computed."""
    return sample.metadata["environment"]["reward"]
