"""Python's cycle collector in a process whose event loop must not stall.

By default a full collection walks everything that lives, imported modules included, again and again: with thousands of
samples in flight that is a tenth of a second at a time. Reference counting frees samples without it.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 50_000, 20, 100
"""New containers before a look at the youngest, such looks before one at the next age, and so on."""


def tune_garbage_collection() -> None:
    """Call it when everything is imported: what lives now is never looked at again, the rest seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
