"""Real time."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """The `Clock` port: wall-clock seconds, and the event loop's sleep."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
