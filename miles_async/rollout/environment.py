"""Generates samples in an environment of `verifiers`, `openenv` or ROLL, which also computes their rewards.

    --environment verifiers:my_taskset --custom-generate-function-path miles_async.rollout.environment.generate

The environment runs in a separate process and reaches the model over the endpoint of the run, so the trained tokens
are the sampled ones. If the environment fails, the sample is generated again; it never gets a reward of 0 instead.
"""

from __future__ import annotations

from typing import Any

from miles_async.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Run the task of the sample, and set its reward; `metadata["metrics"]` has the metrics of the environment.

    If each step of the task is a segment, `metadata["step"]` of a segment has the `reward` and the `state` of its step.
    """
    async with args.agents.session(sample, sampling_params) as base_url:
        result = await args.environment_process.run(sample.metadata["task"], base_url)
    sample.reward, sample.metadata["metrics"] = result["reward"], result["metrics"]
    if "steps" in result:
        segments = [one for one in args.agents.segments(sample) if one.has_trained_tokens]
        for segment, step in zip(segments, result["steps"], strict=True):
            segment.metadata["step"] = step
    return sample
