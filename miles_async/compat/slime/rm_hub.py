"""slime's names for the rewards of a run: `rm_type`, or `custom_rm_path`, is called as in the pipeline.

Both functions may be called from any thread. Time limits, processes and `reward_key` are those of the run; a reward
that fails raises TrajectoryError.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from miles_async.config.user_functions import load_function
from miles_async.rewards.remote import RemoteReward
from miles_async.rollout.contract import Arguments
from miles_async.types import Sample


async def async_rm(args: Arguments, sample: Sample, **kwargs: Any) -> Any:
    """Return the reward of a finished sample: a number, or a dictionary if `reward_key` is set.

    `custom_rm_path` gets `kwargs`, as in slime. With any, the function is called here, without a time limit.

    Example::

        sample.reward = await async_rm(args, sample)
    """
    if kwargs and args.custom_rm_path is not None:
        return await _called_here(args, sample, kwargs)
    [reward] = await _rewards(args, [sample], {})
    return reward


async def batched_async_rm(
    args: Arguments, samples: Sequence[Sample], inplace_set_reward_field: bool = False, **kwargs: Any
) -> list[Any] | None:
    """Return the rewards of several samples, in order. With `group_rm`, one call of the reward scores all of them.

    With Miles' `inplace_set_reward_field`, the samples get their rewards, and None is returned. `kwargs` are those of
    `async_rm`.
    """
    rewards = await _rewards(args, samples, kwargs)
    if not inplace_set_reward_field:
        return rewards
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    return None


async def _rewards(args: Arguments, samples: Sequence[Sample], kwargs: dict[str, Any]) -> list[Any]:
    if kwargs and args.custom_rm_path is not None:
        if args.group_rm:
            return list(await _called_here(args, list(samples), kwargs))
        return await asyncio.gather(*(_called_here(args, sample, kwargs) for sample in samples))
    rewards: list[Any] = await args.sample_service.rewards_of(list(samples))
    return rewards


async def remote_rm(args: Arguments, sample: Sample, max_retries: int | None = None) -> Any:
    """Return the answer of the server at `rm_url` to a POST of prompt, response and label.

    `max_retries` is the number of attempts; by default `remote_rm_retries` + 1. Calls of this function share no
    connections and no limit. Raises InfrastructureError if all attempts fail, and RuntimeError for a 4xx status.
    """
    settings = args if max_retries is None else args.with_values(remote_rm_retries=max_retries - 1)
    reward = RemoteReward(settings)
    try:
        return await reward(args, sample)
    finally:
        await reward.close()


async def _called_here(args: Arguments, scored: Sample | list[Sample], kwargs: dict[str, Any]) -> Any:
    reward = load_function(args.custom_rm_path, setting="custom_rm_path")(args, scored, **kwargs)
    return await reward if inspect.isawaitable(reward) else reward
