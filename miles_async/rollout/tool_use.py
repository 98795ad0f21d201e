"""Several turns with tools: a Python calculator and a search index (in the manner of ReTool and Search-R1).

    --custom-generate-function-path miles_async.rollout.tool_use.generate --tool-search-corpus documents.jsonl

The model calls a tool by `<python>12 * 34</python>` or `<search>capital of France</search>`; its turn ends there, and
it goes on behind `<result>408</result>`, which is not trained on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from miles_async.adapters.sglang.multi_turn import count_observations
from miles_async.rollout.tools.calculator import calculate
from miles_async.rollout.tools.search import SearchIndex
from miles_async.types import Sample, SampleStatus

CALLS = {"python", "search"}
ENDS = [f"</{name}>" for name in sorted(CALLS)]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """At most `tool_max_turns` turns; `metadata["tool_calls"]` counts the calls that were answered."""
    params = {**sampling_params, "stop": [*(sampling_params["stop"] or ()), *ENDS], "no_stop_trim": True}
    longest = sampling_params["max_new_tokens"]
    while (calls := count_observations(sample)) < args.tool_max_turns:
        sample.metadata["tool_calls"] = calls
        await args.turns.sample(sample, params)
        call = called(args.turns.latest_text(sample))
        if sample.status is not SampleStatus.COMPLETED or call is None:
            return sample
        result = f"<result>{answer(*call, args.tool_search_corpus)}</result>"
        if args.turns.observe(sample, result, room=longest - sample.response_length):
            break
    sample.metadata["tool_calls"] = count_observations(sample)
    sample.status = SampleStatus.TRUNCATED
    return sample


def called(turn: str) -> tuple[str, str] | None:
    """The tool and its input, where the turn ends with a call."""
    # A token that ends the call may reach past it, into a line break.
    turn = turn.rstrip()
    for name in CALLS:
        if turn.endswith(end := f"</{name}>"):
            _, opening, text = turn.removesuffix(end).rpartition(f"<{name}>")
            return (name, text) if opening else None
    return None


def answer(tool: str, text: str, corpus: str | None) -> str:
    if tool == "python":
        return calculate(text)
    if corpus is None:
        return "error: there is nothing to search"
    return "\n".join(_index(corpus).search(text)) or "nothing found"


@lru_cache(maxsize=4)
def _index(corpus: str) -> SearchIndex:
    return SearchIndex.of_file(corpus)
