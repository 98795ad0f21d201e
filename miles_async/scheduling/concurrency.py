"""How many groups to keep in flight, found by asking the engines: additive increase, multiplicative decrease.

N, the generation batch, is the most that may be in flight. Where engines cannot hold so much (long contexts fill the KV
cache, requests pile up inside the engine and are retracted), less in flight gives the same throughput and fresher
groups. The controller backs off as TCP does (Chiu and Jain, 1989): halving is quick enough to end an overload, adding
is slow enough not to cause the next, and the two together settle near what the engines can hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.types import EngineLoad

KV_USAGE_HIGH = 0.9
"""From here on SGLang soon retracts running requests to make room."""
QUEUED_HIGH = 8
"""Requests waiting inside one engine; a few keep its batch full, more only grow old."""
BACK_OFF = 0.5


class AdaptiveConcurrency:
    """`limit` groups may be in flight: at first `most`, never below 1.

    It changes once per round, that is, after as many groups ended as the limit allows: what an engine reports before
    then is still the doing of the limit before.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self._round_ends = 0
        """Ended groups at which the next change may come."""

    def observe(self, loads: Sequence[EngineLoad], in_flight: int, ended: int) -> None:
        """Take note of the engines' present loads, the groups in flight, and those that ended since the run began.

        An overload halves the limit. Otherwise it grows by a sixteenth of `most`, but only while it is what holds
        admission back: a limit that nothing touches has proven nothing.
        """
        if not loads or ended < self._round_ends:
            return
        if any(load.kv_usage > KV_USAGE_HIGH or load.queued > QUEUED_HIGH for load in loads):
            self.limit = max(1, int(min(self.limit, in_flight) * BACK_OFF))
        elif in_flight >= self.limit and self.limit < self.most:
            self.limit = min(self.most, self.limit + max(1, self.most // 16))
        else:
            return
        self._round_ends = ended + self.limit
