"""The clocks of the operating system."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements the `Clock` port with the clocks of the operating system and the sleep of the event loop."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
