"""When to say that nothing moves, and when to look deeper."""

from __future__ import annotations


class StallClock:
    """Due once per `warn_seconds` of stillness, until something moves again."""

    def __init__(self, warn_seconds: float) -> None:
        self._warn_seconds = warn_seconds
        self._warnings = 0

    def due(self, still: float) -> bool:
        """Whether to warn now, after `still` seconds without progress."""
        if still < self._warn_seconds:
            self._warnings = 0
            return False
        if still < self._warn_seconds * (self._warnings + 1):
            return False
        self._warnings = int(still // self._warn_seconds)
        return True


def dumps_stacks(still: float, warn_seconds: float, abort_seconds: float) -> bool:
    """Whether to look deeper after `still` seconds: with the second warning, or the last before the run is ended."""
    return still >= min(2 * warn_seconds, max(warn_seconds, abort_seconds - warn_seconds))
