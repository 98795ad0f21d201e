"""A generate function with tools, a Python calculator and a search index, in the manner of ReTool and Search-R1.

    --custom-generate-function-path miles_async.rollout.tool_use.generate --tool-search-corpus documents.jsonl

The model calls a tool by writing `<python>12 * 34</python>` or `<search>capital of France</search>`, which ends its
turn. The result, `<result>408</result>`, is appended and not trained on; then the model continues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from miles_async.adapters.sglang.multi_turn import count_observations
from miles_async.rollout.tools.calculator import calculate
from miles_async.rollout.tools.search import SearchIndex
from miles_async.types import Sample, SampleStatus

TOOLS = {"python", "search"}
CALL_ENDS = [f"</{name}>" for name in sorted(TOOLS)]
"""Stop strings: the closing tags of tool calls."""


Tool = Callable[[str, str], Awaitable[str]]
"""`(name, input) -> output`: runs a tool."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate a response with at most `tool_max_turns` tool calls; `metadata["tool_calls"]` counts them."""

    async def run(name: str, text: str) -> str:
        return run_tool(name, text, args.tool_search_corpus)

    return await generate_with(run, args, sample, sampling_params)


async def generate_with(run: Tool, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate a response as `generate` does, and let `run` execute the tool calls of the model."""
    params = {**sampling_params, "stop": [*(sampling_params["stop"] or ()), *CALL_ENDS]}
    longest = sampling_params["max_new_tokens"]
    while (calls := count_observations(sample)) < args.tool_max_turns:
        sample.metadata["tool_calls"] = calls
        await args.turns.sample(sample, params)
        call = parse_call(args.turns.latest_text(sample))
        if sample.status is not SampleStatus.COMPLETED or call is None:
            return sample
        result = f"<result>{await run(*call)}</result>"
        if args.turns.observe(sample, result, room=longest - sample.response_length):
            break
    sample.metadata["tool_calls"] = count_observations(sample)
    sample.status = SampleStatus.TRUNCATED
    return sample


def parse_call(turn: str) -> tuple[str, str] | None:
    """The tool and its input if the turn ends with a call, else None."""
    # The last token of a call may include a line break after the closing tag.
    turn = turn.rstrip()
    for name in TOOLS:
        if turn.endswith(end := f"</{name}>"):
            _, start_tag, text = turn.removesuffix(end).rpartition(f"<{name}>")
            return (name, text) if start_tag else None
    return None


def run_tool(tool: str, text: str, corpus: str | None) -> str:
    """Run a tool and return its output, or `error: …` for the model to read."""
    if tool == "python":
        return calculate(text)
    if corpus is None:
        return "error: no search corpus is configured"
    return "\n".join(_index(corpus).search(text)) or "nothing found"


@lru_cache(maxsize=4)
def _index(corpus: str) -> SearchIndex:
    return SearchIndex.from_file(corpus)
