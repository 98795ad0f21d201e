"""Settings of memory, for event loops that must not be blocked and hold gigabytes of arrays, and for long imports.

By default, each full collection traverses all live objects, including imported modules. With thousands of samples in
flight, a collection blocks the event loop for a tenth of a second. Samples are freed by reference counting, so the
collector is rarely needed.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = 50_000, 20, 100
"""Arguments of `gc.set_threshold`; the defaults of Python are 700, 10 and 10.

The first generation is collected after 50,000 new container objects, the second generation after 20 collections of the
first, and the third generation after 100 collections of the second.
"""


LARGE_BLOCK_BYTES = 1 << 20
"""Blocks of this size and larger are returned to the operating system when they are freed."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""From glibc's malloc.h."""


def tune_memory() -> None:
    """Exclude all current objects from collection, collect new objects rarely, and return large blocks when they are
    freed. Call it after all imports.

    By default, glibc raises its limit for such blocks up to 32 MiB when one is freed. The arrays of long samples then
    leave holes between other blocks. Threads that have their own heaps, as glibc's have by default, leave more of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    libc = ctypes.CDLL(None)
    # Other C libraries do not have the function.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Turn the collector off inside the block, which should contain only imports.

    Importing SGLang or Megatron creates millions of objects that stay alive. The collector would traverse them dozens
    of times, an eighth of the CPU time of the import, and free nothing. At the end they are excluded from later
    collections, as the documentation of `gc.freeze` recommends before a fork: a collection in a forked process would
    otherwise write to, and thereby copy, each page of memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
