"""A lock with an owner and a time limit: an owner that hangs is named and loses the lock."""

from __future__ import annotations

import asyncio

import pytest

from miles_async.errors import FatalError
from miles_async.pipeline.tasks import Lease

pytestmark = pytest.mark.virtual_time


async def test_an_owner_that_hangs_is_named_and_the_others_continue() -> None:
    lease = Lease("the staging buffer", 900.0)

    async def hang() -> None:
        async with lease.held_by("the publish of version 7"):
            await asyncio.Event().wait()

    hanging = asyncio.create_task(hang())
    await asyncio.sleep(1.0)
    async with lease.held_by("engine-1, which joins"):
        assert asyncio.get_running_loop().time() == 900.0
    with pytest.raises(FatalError, match="the publish of version 7 has held the staging buffer for 900 s"):
        await hanging


async def test_a_failure_of_an_owner_is_raised_unchanged() -> None:
    lease = Lease("the staging buffer", 900.0)
    with pytest.raises(TimeoutError, match="its own"):
        async with lease.held_by("engine-1, which joins"):
            raise TimeoutError("its own")
