"""A reward for tool use: 1 if a tool returned the correct answer.

    --custom-rm-path examples.tool_reward.reward

A row holds the correct value in `metadata["answer"]`. The label of a row is the tool call that computes it; the warm
start trains the model to make this call.
"""

from __future__ import annotations

import re
from typing import Any

from miles_async.types import Sample

RESULT = re.compile(r"<result>(.*?)</result>", re.DOTALL)


def reward(args: Any, sample: Sample) -> float:
    """Return 1 if the last tool result equals the answer, and 0 otherwise."""
    results = RESULT.findall(sample.response) if sample.metadata["tool_calls"] else []
    return float(bool(results) and results[-1] == sample.metadata["answer"])
