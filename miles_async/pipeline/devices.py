"""Devices that learner and engines share in turns (`--colocate`)."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

from miles_async.ports import Fleet, Learner


class SharedDevices:
    """Moves learner and engines on and off their devices. Does nothing unless they are colocated.

    The learner holds a lock while it uses the devices, so that no engine is started on them meanwhile.
    """

    def __init__(self, learner: Learner, fleet: Fleet, *, colocated: bool) -> None:
        self._learner = learner
        self._fleet = fleet
        self._colocated = colocated
        self._lock = asyncio.Lock()
        self._learner_has_them = False

    async def release_learner(self) -> None:
        """Move the learner off the devices at start-up: learner and engines start on both, and the engines go first."""
        if self._colocated:
            await self._learner.offload()

    async def to_learner(self) -> None:
        """Move the engines off the devices, unless the learner has them already. No request may be in flight."""
        if self._colocated and not self._learner_has_them:
            await self._lock.acquire()
            await self._fleet.offload()
            await self._learner.onload()
            self._learner_has_them = True

    async def to_engines(self) -> None:
        """Move the learner off the devices. Staged weights are not affected, because they are in host memory."""
        if self._colocated:
            self._learner_has_them = False
            await self._learner.offload()
            await self._fleet.onload()
            self._lock.release()

    def engine_start(self) -> AbstractAsyncContextManager[None]:
        """A block inside which an engine may be started on the devices."""
        return self._lock if self._colocated else nullcontext()
