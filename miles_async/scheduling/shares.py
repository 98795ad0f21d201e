"""Which adapter comes next, so that each gets its share by weight, and none waits for another that has no work.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each turn of an adapter advances its own virtual time by
1 / weight, and the adapter with the lowest virtual time is next. An adapter that had no work begins again at the
virtual time of the others, so it does not make up for turns that it could not use, and nobody waits while it catches
up.

While all adapters have work, the turns of two of them, divided by their weights, differ by at most the sum of both
1 / weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Shares:
    """Takes turns.

    Example::

        shares = Shares({"math": 2.0, "code": 1.0})
        [shares.take(("math", "code")) for _ in range(3)]  # ["math", "code", "math"]
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` are positive, in the order in which adapters with equal virtual times are taken."""
        self._weights = dict(weights)
        self._times = dict.fromkeys(weights, 0.0)
        """The virtual time of each adapter, at which its next turn begins."""
        self._now = 0.0
        """The virtual time at which the last turn began."""

    def next(self, candidates: Collection[str]) -> str:
        """Return whose turn it is among `candidates`, those that have work. Raises ValueError if there are none."""
        return min((name for name in self._times if name in candidates), key=self._start)

    def take(self, candidates: Collection[str]) -> str:
        """Return whose turn it is, and count the turn."""
        name = self.next(candidates)
        self.count(name)
        return name

    def count(self, name: str) -> None:
        """Count a turn of an adapter."""
        self._now = self._start(name)
        self._times[name] = self._now + 1 / self._weights[name]

    def _start(self, name: str) -> float:
        return max(self._times[name], self._now)
