"""A lock has an owner and a lease: what hangs while it holds one is named, and holds it no longer."""

from __future__ import annotations

import asyncio

import pytest

from miles_async.errors import FatalError
from miles_async.pipeline.tasks import Lease
from tests.sim.virtual_time import run_virtual


def test_an_owner_that_hangs_is_named_and_others_go_on() -> None:
    async def story() -> None:
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

    run_virtual(story())


def test_an_owners_own_failure_comes_out_as_it_is() -> None:
    async def story() -> None:
        lease = Lease("the staging buffer", 900.0)
        with pytest.raises(TimeoutError, match="its own"):
            async with lease.held_by("engine-1, which joins"):
                raise TimeoutError("its own")

    run_virtual(story())
