"""Calls to all learner ranks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from miles_async.adapters.ray.actor_errors import death_of
from miles_async.errors import FatalError, MilesError

Rank = Any
"""Handle of a `workers.learner.LearnerRank` actor."""


async def of_all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The answers of all ranks, or the failure of the first one: the others would wait for it.

    Raises what the rank raised where that is an error of ours, and Fatal where it is not or where the rank is lost.
    """
    try:
        return list(await asyncio.gather(*calls))
    except RayTaskError as error:
        if isinstance(error.cause, MilesError):
            raise error.cause from None
        raise FatalError(f"a learner rank failed: {type(error.cause).__name__}: {error.cause}") from error
    except RayActorError as error:
        raise FatalError(death_of(error)) from error
