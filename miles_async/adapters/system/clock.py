"""The system clock."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements the `Clock` port with wall-clock time in seconds and the sleep of the event loop."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
