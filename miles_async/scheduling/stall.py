"""Decides when a run without progress is worth a warning, and when the stacks of its processes should be dumped.

The rollout worker, the driver's report and the watchdog share these rules, so that their warnings agree. A run makes
progress when a group is collected, a step ends or a version goes live, and while the learner works or an evaluation
runs (`pipeline.run_state`).
"""

from __future__ import annotations


class StallClock:
    """Becomes due once per `warn_seconds` without progress, and starts over after progress.

    Example::

        clock = StallClock()
        clock.due(29.0, warn_seconds=30.0)  # False
        clock.due(31.0, warn_seconds=30.0)  # True: the first warning
        clock.due(45.0, warn_seconds=30.0)  # False: already warned for this interval
        clock.due(60.0, warn_seconds=30.0)  # True: the second warning
    """

    def __init__(self) -> None:
        self._warnings = 0
        """Intervals of the current stall that a warning has been due for."""

    def due(self, idle_seconds: float, warn_seconds: float) -> bool:
        """Whether to warn now, `idle_seconds` after the last progress."""
        if idle_seconds < warn_seconds:
            self._warnings = 0
            return False
        if idle_seconds < warn_seconds * (self._warnings + 1):
            return False
        # A late call may skip intervals; it warns once for all of them.
        self._warnings = int(idle_seconds // warn_seconds)
        return True


def dumps_stacks(idle_seconds: float, warn_seconds: float, abort_seconds: float) -> bool:
    """Whether to dump stacks: at the second warning, or at the last one before the abort if that is earlier."""
    return idle_seconds >= min(2 * warn_seconds, max(warn_seconds, abort_seconds - warn_seconds))
