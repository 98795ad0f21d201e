"""A reward for tool use: did a tool come to the answer?

    --custom-rm-path examples.tool_reward.reward

Rows name the value in `metadata["answer"]`; their label is the call that finds it, which a warm start teaches.
"""

from __future__ import annotations

import re
from typing import Any

from miles_async.types import Sample

RESULT = re.compile(r"<result>(.*?)</result>", re.DOTALL)


def reward(args: Any, sample: Sample) -> float:
    """1 where the last result of a tool is the answer."""
    results = RESULT.findall(sample.response) if sample.metadata["tool_calls"] else []
    return float(bool(results) and results[-1] == sample.metadata["answer"])
