"""The reward of reasoning-gym: the task that produced a problem scores the response.

Many tasks evaluate the response as Python code (`eval`, `sympy.parse_expr`), so this module is imported only in grader
processes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import reasoning_gym

from miles_async.types import Sample


class ReasoningGymReward:
    """Scores a response with the task: 1 is correct, and many tasks give partial credit.

    Reads the problem from `sample.metadata["entry"]`, where the reasoning-gym data source stores it.
    """

    def __init__(self, args: Any) -> None:
        """Create the task from `reasoning_gym_task` and `reasoning_gym_settings` of `args`; some tasks take seconds."""
        self._dataset = reasoning_gym.create_dataset(args.reasoning_gym_task, **args.reasoning_gym_settings)
        # Some scorers import modules when they are called first, which every child process would repeat.
        with suppress(Exception):
            entry = self._dataset[0]
            self._dataset.score_answer(str(entry["answer"]), entry)

    def __call__(self, args: Any, sample: Sample) -> float:
        return float(self._dataset.score_answer(sample.response.strip(), sample.metadata["entry"]))
