"""The reward of reasoning-gym: the task that produced a problem scores the response.

Many tasks evaluate the response as Python code (`eval`, `sympy.parse_expr`), so this module is imported only in grader
processes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import reasoning_gym as gym

from miles_async.types import Sample


def reasoning_gym(args: Any, sample: Sample) -> float:
    """Return the score of the task: 1 is correct, and many tasks give partial credit.

    `args` has `reasoning_gym_task` and `reasoning_gym_settings`. Reads the problem from `sample.metadata["entry"]`,
    where the reasoning-gym data source stores it.
    """
    dataset = _dataset(args.reasoning_gym_task, msgspec.json.encode(args.reasoning_gym_settings))
    return float(dataset.score_answer(sample.response.strip(), sample.metadata["entry"]))


@cache
def _dataset(task: str, settings: bytes) -> Any:
    return gym.create_dataset(task, **msgspec.json.decode(settings))
