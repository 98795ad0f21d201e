"""Waiting for real processes, with a time limit that is long enough for a loaded machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 120.0
"""A test fails if something that takes moments on an idle machine has not happened by then."""
START_SECONDS = 900.0
"""The same for a start of a run or of several learner ranks, which takes about a minute on an idle machine."""


def wait_until(reached: Callable[[], T], what: str, *, within: float = PATIENCE_SECONDS, every: float = 0.05) -> T:
    """The first true result of `reached`, which is called again and again. Fails the test after `within` seconds."""
    deadline = time.monotonic() + within
    while not (result := reached()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(every)
    return result
