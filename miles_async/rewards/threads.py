"""Calls of plain reward functions and hooks in threads. Those of rewards have a deadline each, from their beginning."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

from miles_async.types import Sample

_Calls = SimpleQueue[Callable[[], None] | None]
"""The calls of one thread; None ends it."""


class Threads:
    """Daemon threads that are reused; a call always finds a free one.

    The pool of the standard library would not do: a function that hangs forever would occupy one of its threads, and
    keep the process alive. A new thread per group would cost more time than a simple reward.
    """

    def __init__(self) -> None:
        self._free: deque[_Calls] = deque()
        """The queues of the threads that wait for a call."""
        self._closed = False

    async def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, which runs in one of the threads."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def resolve(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                result = call()
            except BaseException as error:
                # `sys.exit` in a function must not end the run, and a future does not accept StopIteration.
                ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
                failure = error if ordinary else RuntimeError(repr(error))
            # The event loop is closed if the run ended without waiting for this call.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, result, failure)

        # The thread gets a copy of the context: the skip manager and the fields of log lines are context variables.
        self._start(partial(copy_context().run, run))
        return await done

    async def score(
        self, call: Callable[[Sample], Any], samples: Sequence[Sample], timeout_seconds: float | None
    ) -> list[Any]:
        """Return `call(sample)` for the samples in order, up to the first call that misses its deadline.

        That call cannot be interrupted, but its thread makes no further one.
        """
        series = _Series(call, samples)
        work = asyncio.ensure_future(self.run(series.run))
        try:
            while not work.done():
                left = series.seconds_left(timeout_seconds)
                if left is not None and left <= 0:
                    break
                await asyncio.wait([work], timeout=left)
        finally:
            results = series.end()
            work.cancel()
        if work.done() and not work.cancelled():
            work.result()
        return results

    def close(self) -> None:
        """End the threads; a thread that runs a call ends after it."""
        self._closed = True
        for calls in list(self._free):
            calls.put(None)

    def _start(self, call: Callable[[], None]) -> None:
        """Run `call`, which must not raise, in a thread."""
        try:
            calls = self._free.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), name="user-function", daemon=True).start()
        calls.put(call)

    def _serve(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            call()
            self._free.append(calls)
            if self._closed:
                return


class _Series:
    """Calls that a thread makes one after the other, until the event loop ends them."""

    def __init__(self, call: Callable[[Sample], Any], samples: Sequence[Sample]) -> None:
        self._call = call
        self._samples = samples
        self._lock = threading.Lock()
        self._results: list[Any] = []
        self._ended = False
        self._began = time.monotonic()
        """When the current call began."""

    def run(self) -> None:
        """Make the calls. This method runs in the thread."""
        for sample in self._samples:
            with self._lock:
                if self._ended:
                    return
                self._began = time.monotonic()
            result = self._call(sample)
            with self._lock:
                if self._ended:
                    return
                self._results.append(result)

    def seconds_left(self, timeout_seconds: float | None) -> float | None:
        """The seconds until the current call misses its deadline."""
        return None if timeout_seconds is None else self._began + timeout_seconds - time.monotonic()

    def end(self) -> list[Any]:
        """Make no further call. Returns the results so far."""
        with self._lock:
            self._ended = True
            return self._results
