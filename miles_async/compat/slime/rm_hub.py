"""slime's names for the rewards of a run: `rm_type`, or `custom_rm_path`, is called as in the pipeline.

Both functions may be called from any thread. Time limits, processes and `reward_key` are those of the run; a reward
that fails raises TrajectoryError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_async.rollout.contract import Arguments
from miles_async.types import Sample


async def async_rm(args: Arguments, sample: Sample) -> Any:
    """Return the reward of a finished sample: a number, or a dictionary if `reward_key` is set.

    Example::

        sample.reward = await async_rm(args, sample)
    """
    [reward] = await batched_async_rm(args, [sample])
    return reward


async def batched_async_rm(args: Arguments, samples: Sequence[Sample]) -> list[Any]:
    """Return the rewards of several samples, in order. With `group_rm`, one call of the reward scores all of them."""
    rewards: list[Any] = await args.sample_service.rewards_of(list(samples))
    return rewards
