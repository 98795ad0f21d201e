"""Scores a group, and again the samples whose reward failed for reasons of infrastructure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from miles_async.errors import InfrastructureError
from miles_async.ports import Rewarder
from miles_async.types import Group

REWARD_PAUSE_SECONDS = 1.0
"""Delay before samples are scored again whose reward failed; it doubles with each failure."""


async def score(
    group: Group,
    rewarder: Rewarder,
    *,
    sleep: Callable[[float], Awaitable[None]],
    max_attempts: int,
    stopping: Callable[[], bool] = lambda: False,
) -> InfrastructureError | None:
    """Score the samples up to `max_attempts` times; those that failed keep their tokens.

    Returns the error of the last attempt, which names the samples without a reward, or None if all have one. No further
    attempt begins once `stopping` returns True. Raises as `Rewarder.score` for any other failure.
    """
    failures = 0
    while True:
        try:
            await rewarder.score(group)
            return None
        except InfrastructureError as error:
            failures += 1
            if failures == max_attempts or stopping():
                return error
        await sleep(REWARD_PAUSE_SECONDS * 2 ** (failures - 1))
