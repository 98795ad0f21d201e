"""Generates a sample with an agent that was written for Miles (`--custom-agent-function-path`).

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None

The agent sends chat completions to `{base_url}/v1/chat/completions`, without a key. What it returns is added to the
metadata of the sample, where the reward finds it. An agent that raises is called again for the sample, as any generate
function is (`rollout/generate.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from miles_async.compat.miles.lengths import limits_of
from miles_async.config.user_functions import load_function
from miles_async.errors import TrajectoryError
from miles_async.json_values import shown_type
from miles_async.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the agent send its requests; the session stores the sampled tokens in the sample."""
    agent = load_function(args.custom_agent_function_path, setting="custom_agent_function_path")
    longest, answer = limits_of(args, sample, sampling_params)
    params = {**sampling_params, "max_new_tokens": longest}
    async with args.agents.session(sample, params, needs_key=False) as base_url:
        limit = {} if args.max_seq_len is None else {"max_seq_len": args.max_seq_len}
        result = await agent(
            base_url=base_url.removesuffix("/v1"),
            prompt=sample.prompt,
            request_kwargs=request_kwargs({**sampling_params, "max_new_tokens": answer}),
            metadata={**sample.metadata, **limit, "session_server_id": urlsplit(base_url).netloc},
        )
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # The agent has caught the cancellation, so the trajectory ends before its end.
            raise asyncio.CancelledError
    if result is not None and not isinstance(result, dict):
        raise TrajectoryError(
            f"sample {sample.index}: the agent {args.custom_agent_function_path} returned {shown_type(result)}: return "
            "a dictionary for sample.metadata, or None"
        )
    sample.metadata.update(result or {})
    return sample


def request_kwargs(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's sampling parameters as those of a chat completion, without those that are unset."""
    kept = {name: value for name, value in sampling_params.items() if value is not None}
    # A chat completion calls `max_new_tokens` `max_tokens`, and has no `spaces_between_special_tokens`.
    kept["max_tokens"] = kept.pop("max_new_tokens")
    kept.pop("spaces_between_special_tokens", None)
    return kept
