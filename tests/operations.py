"""Counts operations, so that a test of growing costs does not depend on time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(work: Callable[[], Any]) -> int:
    """Return how many functions `work` calls in this thread, those of Python and of C."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    # A garbage collection in between would call what others have registered for it.
    gc.disable()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count
