"""The reward `reasoning_gym`; `rewards/gym.py` computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_async.rewards.plugin import Reward, RewardFunction, RunsIn

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig


class ReasoningGym(Reward):
    """The score of the reasoning-gym task: 1 is correct, and many tasks give partial credit."""

    name = "reasoning_gym"
    runs_in = RunsIn.CHILD
    reads = ("reasoning_gym_task", "reasoning_gym_settings")

    def open(self, settings: Any) -> RewardFunction:
        """Many tasks evaluate the response as Python code, so the library is imported only in grader processes."""
        from miles_async.rewards.gym import ReasoningGymReward

        return ReasoningGymReward(settings)

    def missing(self, config: RunConfig) -> str | None:
        if config.data.reasoning_gym_task is not None:
            return None
        return "scores only reasoning_gym_task problems; set rm_type to exact, for example"
