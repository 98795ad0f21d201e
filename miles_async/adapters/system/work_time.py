"""The seconds that a part of the learner has worked, by which a long step or checkpoint is told from a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class WorkTime:
    """The seconds that a rank has worked: they do not grow while the rank waits for a call or for another rank.

    Work is CPU time of the thread that runs the model, and the time in which checkpoints are written, because a thread
    that waits for a disk uses no CPU time.
    """

    def __init__(self) -> None:
        self._cpu_clock: int | None = None
        self._written_seconds = 0.0
        self._writing_since: float | None = None

    def count_this_thread(self) -> None:
        """Count the CPU time of the calling thread from now on."""
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count the time inside the block."""
        self._writing_since = started = time.monotonic()
        try:
            yield
        finally:
            self._writing_since = None
            self._written_seconds += time.monotonic() - started

    @property
    def seconds(self) -> float:
        cpu_seconds = 0.0 if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)
        now_writing = 0.0 if self._writing_since is None else time.monotonic() - self._writing_since
        return cpu_seconds + self._written_seconds + now_writing
