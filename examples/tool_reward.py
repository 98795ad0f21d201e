"""A reward for tool use: 1 if a tool returned the correct answer.

    --custom-rm-path examples.tool_reward.reward

A row holds the correct value in `metadata["answer"]`. The label of a row is the tool call that computes it; the warm
start trains the model to make this call.
"""

from __future__ import annotations

from typing import Any

from miles_async.types import Sample


def reward(args: Any, sample: Sample) -> float:
    """Return 1 if the last tool result equals the answer, and 0 otherwise."""
    before, _, _ = sample.response.rpartition("</result>")
    _, opened, result = before.rpartition("<result>")
    return float(bool(sample.metadata["tool_calls"] and opened) and result == sample.metadata["answer"])
