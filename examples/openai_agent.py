"""An agent that uses the OpenAI API, trained without changes to the agent.

    --custom-generate-function-path examples.openai_agent.generate --custom-rm-path examples.openai_agent.reward

The agent offers the model a calculator, executes the tool calls of the model, and asks for the final answer. The
function `solve` is the agent; nothing in it depends on the training.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from miles_async.rollout.tools.calculator import calculate
from miles_async.types import Sample

MAX_ROUNDS = 4
"""Limit for the rounds of tool calls."""
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Value of an arithmetic expression",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Let the agent solve the prompt; the session stores the sampled tokens in the sample."""
    async with model_client(args, sample, sampling_params) as client:
        sample.metadata["answer"] = await solve(client, sample.messages)
    return sample


@asynccontextmanager
async def model_client(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> AsyncIterator[openai.AsyncOpenAI]:
    """Open a session that records what the model samples, and yield a client for it."""
    async with (
        args.agents.session(sample, sampling_params) as base_url,
        # The endpoint uses plain HTTP on this machine. Loading certificates would take longer than a short
        # conversation.
        openai.DefaultAsyncHttpxClient(verify=False, trust_env=False) as http,
        openai.AsyncOpenAI(base_url=base_url, api_key=args.agents.api_key, max_retries=0, http_client=http) as client,
    ):
        yield client


def reward(args: Any, sample: Sample) -> float:
    """Return 1 if the answer of the agent equals the label, and 0 otherwise."""
    return float(sample.metadata["answer"].strip() == str(sample.label).strip())


async def solve(client: openai.AsyncOpenAI, messages: list[Any]) -> str:
    """Return the answer of the model to the last message."""
    for _ in range(MAX_ROUNDS):
        message, more = await _ask(client, messages, tools=[CALCULATOR])
        if not more or not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculate(json.loads(call.function.arguments).get("expression", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "user", "content": "The answer alone, please."})
    message, _ = await _ask(client, messages)
    return message.content or ""


async def _ask(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> tuple[Any, bool]:
    """Append the answer of the model to `messages`. Return it, and whether the response limit allows another one."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **options)
    [choice] = answer.choices
    messages.append(choice.message.model_dump(exclude_none=True))
    return choice.message, choice.finish_reason != "length"
