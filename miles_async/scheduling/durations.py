"""How long the groups of this run take, so that a slow group can be told from one that is stuck."""

from __future__ import annotations

from collections import deque

RECENT_GROUPS = 1000
"""Number of groups whose durations are remembered."""
FIRST_GROUPS = 50
"""Number of groups before the first estimate."""
QUANTILE = 0.99
MARGIN = 2.0
"""A group is unusually slow if it takes more than so many times the 99th percentile."""


class GroupDurations:
    """Records the seconds from the first request of each group to its reward.

    A group counts when all groups before it have ended. The groups that end first are the fast ones, so an estimate
    from them would call every other group stuck.

    Example::

        durations = GroupDurations()
        for sequence in range(50):
            durations.record(270.0, sequence)
        durations.slow_seconds  # None: the first group may still be generated
        durations.pass_head(50)
        durations.slow_seconds  # 540.0
    """

    def __init__(self) -> None:
        self.slow_seconds: float | None = None
        """Almost no group takes longer: twice the 99th percentile of the last groups. None if too few groups count."""
        self._waiting: dict[int, float] = {}
        """Seconds of groups that may have unfinished groups before them, by sequence number."""
        self._recent: deque[float] = deque(maxlen=RECENT_GROUPS)

    def record(self, seconds: float, sequence: int | None = None) -> None:
        """Record a group. Without a sequence number it counts at once, because groups are then not in order."""
        if sequence is None:
            self._count(seconds)
        else:
            self._waiting[sequence] = seconds

    def pass_head(self, head: int) -> None:
        """Count the groups before `head`, the oldest group that is neither collected nor dropped."""
        if passed := [sequence for sequence in self._waiting if sequence < head]:
            self._count(*map(self._waiting.pop, passed))

    def _count(self, *seconds: float) -> None:
        self._recent.extend(seconds)
        if len(self._recent) >= FIRST_GROUPS:
            self.slow_seconds = MARGIN * sorted(self._recent)[int(QUANTILE * len(self._recent))]
