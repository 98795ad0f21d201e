"""A lock whose holder has a name and a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miles_async.errors import FatalError


class Lease:
    """Of the thing called `what`. Waiting for it is bounded, because holding it is: at most `seconds`."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def held_by(self, owner: str) -> AsyncIterator[None]:
        """Raises Fatal, with the owner's name, where the time is up: the owner is interrupted and the lock is free."""
        async with self._lock:
            limit = asyncio.timeout(self._seconds)
            try:
                async with limit:
                    yield
            except TimeoutError:
                if not limit.expired():
                    raise
                raise FatalError(
                    f"{owner} has held {self._what} for {self._seconds:.0f} s and was interrupted: a learner rank or "
                    "an engine does not answer; the logs of the run say which"
                ) from None
