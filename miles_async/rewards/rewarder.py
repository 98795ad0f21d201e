"""Scores the samples of a finished group with a built-in reward or the user's own."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from miles_async.config.schema import RunConfig
from miles_async.core.loading import load_function
from miles_async.errors import BadTrajectory, UserError
from miles_async.rewards.builtin import ReasoningGymReward, exact
from miles_async.types import Group, Sample

RewardFunction = Callable[[Any, Sample], Any]
"""`fn(args, sample)`, plain or async (slime's shape); returns a number."""


class Rewarder:
    """Implements `ports.Rewarder`.

    A plain function runs in a thread, one hop per group, so that it may block; an async one for all samples at once.
    """

    def __init__(self, function: RewardFunction, args: Any, *, name: str, timeout_seconds: float) -> None:
        """`args` is the flat view that user functions see; `name` is for messages."""
        self._function = function
        self._args = args
        self._name = name
        self._timeout_seconds = timeout_seconds

    async def score(self, group: Group) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                rewards = await self._rewards(group)
        except TimeoutError:
            raise BadTrajectory(
                f"group {group.feed_index}: reward {self._name} took longer than {self._timeout_seconds:g} s "
                "(reward_timeout_seconds)"
            ) from None
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = self._number(sample, reward)

    async def _rewards(self, group: Group) -> list[Any]:
        if inspect.iscoroutinefunction(self._function):
            return await asyncio.gather(*map(self._await, group))
        return await asyncio.to_thread(lambda: list(map(self._call, group)))

    async def _await(self, sample: Sample) -> Any:
        try:
            return await self._function(self._args, sample)
        except Exception as error:
            raise self._failed(sample, error) from error

    def _call(self, sample: Sample) -> Any:
        try:
            return self._function(self._args, sample)
        except Exception as error:
            raise self._failed(sample, error) from error

    def _failed(self, sample: Sample, error: Exception) -> BadTrajectory:
        return BadTrajectory(f"sample {sample.index}: reward {self._name} raised {type(error).__name__}: {error}")

    def _number(self, sample: Sample, reward: Any) -> float:
        if not isinstance(reward, Real):
            kind = type(reward).__name__
            raise BadTrajectory(
                f"sample {sample.index}: reward {self._name} returned {reward!r}, a {kind}, not a number"
            )
        if not math.isfinite(reward):
            raise BadTrajectory(f"sample {sample.index}: reward {self._name} returned {reward}")
        return float(reward)


def open_rewarder(config: RunConfig, args: Any) -> Rewarder:
    """The reward that the configuration names; `args` is the flat view handed to it.

    Raises UserError when there is none, or the user's function cannot be imported.
    """
    rollout = config.rollout
    if rollout.custom_rm_path is not None:
        name, function = rollout.custom_rm_path, load_function(rollout.custom_rm_path, setting="custom_rm_path")
    else:
        name, function = str(rollout.rm_type), _builtin(config)
    return Rewarder(function, args, name=name, timeout_seconds=rollout.reward_timeout_seconds)


def _builtin(config: RunConfig) -> RewardFunction:
    match config.rollout.rm_type, config.data.reasoning_gym_task:
        case "exact", _:
            return exact
        case "reasoning_gym", None:
            raise UserError("rm_type reasoning_gym needs reasoning_gym_task")
        case "reasoning_gym", str(task):
            return ReasoningGymReward(task, config.data.reasoning_gym_settings)
        case other, _:
            raise UserError(f"rm_type {other!r} is unknown: set reasoning_gym or exact, or your own by custom_rm_path")
