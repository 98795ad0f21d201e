"""Devices that learner and engines share in turns (`--colocate`)."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol


class DeviceUser(Protocol):
    """The learner, or all engines."""

    async def offload(self) -> None:
        """Move off the devices."""
        ...

    async def onload(self) -> None:
        """Move onto the devices, which nobody else uses."""
        ...


class SharedDevices:
    """Moves learner and engines on and off their devices. Does nothing unless they are colocated.

    The learner holds a lock while it uses the devices, so that no engine is started on them meanwhile. Engines measure
    the free memory when they start, so they start on devices that the learner does not use.
    """

    def __init__(self, learner: DeviceUser, engines: DeviceUser, *, colocated: bool) -> None:
        self._learner = learner
        self._engines = engines
        self._colocated = colocated
        self._lock = asyncio.Lock()
        self._learner_has_them = False

    async def begin(self) -> None:
        """Begin with the learner's turn: the engines have started and released the devices, and it has loaded."""
        if self._colocated:
            await self._lock.acquire()
            self._learner_has_them = True

    async def to_learner(self) -> None:
        """Move the engines off the devices, unless the learner has them already. No request may be in flight."""
        if self._colocated and not self._learner_has_them:
            await self._lock.acquire()
            await self._engines.offload()
            await self._learner.onload()
            self._learner_has_them = True

    async def to_engines(self) -> None:
        """Move the learner off the devices. Staged weights are not affected."""
        if self._colocated:
            self._learner_has_them = False
            await self._learner.offload()
            await self._engines.onload()
            self._lock.release()

    def engine_start(self) -> AbstractAsyncContextManager[None]:
        """A block inside which an engine may be started on the devices."""
        return self._lock if self._colocated else nullcontext()
