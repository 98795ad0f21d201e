"""Settings of Python's cyclic garbage collector, for event loops that must not be blocked and for long imports.

By default, each full collection traverses all live objects, including imported modules. With thousands of samples in
flight, a collection blocks the event loop for a tenth of a second. Samples are freed by reference counting, so the
collector is rarely needed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = 50_000, 20, 100
"""Arguments of `gc.set_threshold`; the defaults of Python are 700, 10 and 10.

The first generation is collected after 50,000 new container objects, the second generation after 20 collections of the
first, and the third generation after 100 collections of the second.
"""


def tune_garbage_collection() -> None:
    """Exclude all current objects from collection, and collect new objects rarely. Call it after all imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


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
