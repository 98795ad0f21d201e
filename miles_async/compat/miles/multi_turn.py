"""Generates a sample in several turns with tools that were written for Miles (`--generate-tool-specs-path`).

    tool_specs = [{"type": "function", "function": {"name": "code", "parameters": {…}}}]

    async def execute_tool(name: str, params: dict) -> str

A prompt that is a list of messages shows the tools through the chat template; a prompt that is text is sampled from as
it is. The results of tools are appended as the chat template renders them, and are not trained on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from miles_async.adapters.agents.continuation import tokens_after
from miles_async.adapters.agents.messages import Message, for_template
from miles_async.adapters.sglang.multi_turn import TurnTokenizer, count_observations, is_special
from miles_async.compat.miles.lengths import limits_of
from miles_async.compat.miles.resolution import load_tools
from miles_async.config.user_functions import load_function
from miles_async.errors import TrajectoryError
from miles_async.json_values import shown_type
from miles_async.parsing import decode_json
from miles_async.types import Sample, SampleStatus

Execute = Callable[[str, dict[str, Any]], Awaitable[str]]
"""`(name, params) -> result`: executes a tool call."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sample answers and execute the tool calls in them; `metadata["tool_calls"]` counts the calls.

    The sample ends with an answer without a call, with one that is cut off, or after `generate_max_turns` answers.
    """
    tools = load_tools(args.generate_tool_specs_path)
    execute: Execute = load_function(
        args.generate_execute_tool_function_path, setting="generate_execute_tool_function_path"
    )
    tokenizer: TurnTokenizer = args.turns.tokenizer
    if not sample.response_length:
        sample.metadata["tool_calls"] = 0
        if not isinstance(sample.prompt, str):
            sample.tokens = tokenizer.encode(sample.prompt, tools)
    longest, answer = limits_of(args, sample, sampling_params)
    if args.rollout_max_context_len is not None:
        longest = min(longest, max(1, args.rollout_max_context_len - sample.prompt_length))
    for _ in range(count_observations(sample), args.generate_max_turns):
        limit = min(longest, _observed_length(sample) + answer)
        await args.turns.sample(sample, {**sampling_params, "max_new_tokens": limit})
        if sample.status is not SampleStatus.COMPLETED:
            return sample
        before = sample.metadata["tool_calls"]
        message = await args.agents.read(sample, tools, stop=sampling_params["stop"] or (), calls_before=before)
        if "tool_calls" not in message:
            return sample
        results = [await _execute(execute, call, sample) for call in message["tool_calls"]]
        sample.metadata["tool_calls"] += len(results)
        tokens = await _rendered(tokenizer, tools, message, results, end=int(sample.tokens[-1]))
        args.turns.observe_ids(sample, tokens[: max(longest - sample.response_length, 0)])
    return sample


def _observed_length(sample: Sample) -> int:
    """The number of response tokens up to the end of the last observation."""
    turns = sample.turns
    return turns[-1].start if turns and turns[-1].sampled else sample.response_length


async def _execute(execute: Execute, call: Mapping[str, Any], sample: Sample) -> Message:
    """Execute one call, and return its result as a chat message."""
    function = call["function"]
    result = await execute(function["name"], decode_json(function["arguments"], dict[str, Any]))
    if not isinstance(result, str):
        raise TrajectoryError(
            f"sample {sample.index}: the tool {function['name']} returned {shown_type(result)}: return text"
        )
    return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": result}


async def _rendered(
    tokenizer: TurnTokenizer, tools: list[dict[str, Any]], answer: Message, results: Sequence[Message], *, end: int
) -> list[int]:
    """The tokens between an answer, whose last token is `end`, and the next one, which are those of the results."""
    marker = str(uuid.uuid4().int)

    async def render(messages: Sequence[Message], answer_next: bool) -> str:
        # Results of tools may be long, and rendering them must not stop the event loop.
        shown = list(map(for_template, messages))
        return await asyncio.to_thread(tokenizer.render, shown, tools, answer_next=answer_next)

    return await tokens_after(
        1,
        # Templates refuse a chat without a user. What precedes the answer is cut off.
        [{"role": "user", "content": "."}, answer, *results],
        end,
        marker=marker,
        render=render,
        encode=partial(asyncio.to_thread, partial(tokenizer.encode_text, after=marker)),
        is_special=partial(is_special, tokenizer),
    )
