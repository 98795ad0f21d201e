"""The reward `reasoning_gym`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from miles_async.rewards.plugin import Reward, RewardFunction, RunsIn
from miles_async.types import Sample

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig


class ReasoningGym(Reward):
    """The score of the reasoning-gym task: 1 is correct, and many tasks give partial credit."""

    name = "reasoning_gym"
    runs_in = RunsIn.CHILD
    reads = ("reasoning_gym_task", "reasoning_gym_settings")

    def open(self, settings: Any) -> RewardFunction:
        """Return a function that lets the task score `metadata["entry"]`, where the data source stores the problem.

        Many tasks evaluate the response as Python code (`eval`, `sympy.parse_expr`), so the library is imported only in
        grader processes. Some tasks take seconds to be created.
        """
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(settings.reasoning_gym_task, **settings.reasoning_gym_settings)
        # Some scorers import modules when they are called first, which every child process would repeat.
        with suppress(Exception):
            entry = dataset[0]
            dataset.score_answer(str(entry["answer"]), entry)

        def score(args: Any, sample: Sample) -> float:
            return float(dataset.score_answer(sample.response.strip(), sample.metadata["entry"]))

        return score

    def missing(self, config: RunConfig) -> str | None:
        if config.data.reasoning_gym_task is not None:
            return None
        return "scores only reasoning_gym_task problems; set rm_type to exact, for example"
