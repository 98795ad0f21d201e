"""slime's event loop in a separate thread, for plain functions that call coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class AsyncLoopThread:
    """An event loop in a separate thread, which ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="slime-async-utils", daemon=True).start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result. Blocks the calling thread."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()


@cache
def get_async_loop() -> AsyncLoopThread:
    """The loop that all callers in this process share."""
    return AsyncLoopThread()


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop of `get_async_loop`, and return its result. Blocks the calling thread."""
    return get_async_loop().run(coro)
