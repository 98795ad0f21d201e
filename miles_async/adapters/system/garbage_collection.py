"""Settings of Python's cyclic garbage collector for a process whose event loop must not be blocked.

By default, each full collection traverses all live objects, including imported modules. With thousands of samples in
flight, a collection blocks the event loop for a tenth of a second. Samples are freed by reference counting, so the
collector is rarely needed.
"""

from __future__ import annotations

import gc

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
