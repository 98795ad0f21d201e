"""An agent written against the OpenAI API, trained as it is.

    --custom-generate-function-path examples.openai_agent.generate --custom-rm-path examples.openai_agent.reward

It offers the model a calculator, runs what the model calls, and asks for the bare answer behind the last result.
Nothing in `solve` knows that it is being trained.
"""

from __future__ import annotations

import json
from typing import Any

import openai

from miles_async.rollout.tools.calculator import calculate
from miles_async.types import Sample

MOST_ROUNDS = 4
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Value of an arithmetic expression",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    async with (
        args.agents.session(sample, sampling_params) as base_url,
        # Plain HTTP on loopback: loading certificates would take longer than the rest of a short conversation.
        openai.DefaultAsyncHttpxClient(verify=False, trust_env=False) as http,
        openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=http) as client,
    ):
        sample.metadata["answer"] = await solve(client, str(sample.prompt))
    return sample


def reward(args: Any, sample: Sample) -> float:
    """1 where what the agent came back with is the label."""
    return float(sample.metadata["answer"].strip() == str(sample.label).strip())


async def solve(client: openai.AsyncOpenAI, question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_ROUNDS):
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
    """The model's answer, appended to `messages`, and whether there is room for more."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **options)
    [choice] = answer.choices
    messages.append(choice.message.model_dump(exclude_none=True))
    return choice.message, choice.finish_reason != "length"
