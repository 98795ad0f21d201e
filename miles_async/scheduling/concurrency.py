"""Adapts the number of groups in flight to the load of the engines: additive increase, multiplicative decrease.

N, the generation batch, is the upper limit. If the engines cannot hold N groups (long contexts fill the KV cache, and
requests queue inside the engine or are retracted), fewer groups in flight give the same throughput and fresher data.
The controller follows Chiu and Jain (1989), as TCP does: halving ends an overload quickly, and slow growth avoids the
next one. The limit settles close to what the engines can hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.types import EngineLoad

KV_USAGE_HIGH = 0.9
"""Above this fraction of KV cache in use, SGLang starts to retract running requests."""
QUEUED_HIGH = 8
"""Above this many waiting requests inside one engine, further requests only grow stale; a few keep the batch full."""
BACK_OFF = 0.5
"""Factor by which an overload reduces the limit."""


class AdaptiveConcurrency:
    """Limits the groups in flight to `limit`, which starts at `most` and never falls below 1.

    The limit changes once per round. A round ends when as many groups have ended as the limit allows in flight, because
    the engines' load reflects the previous limit until then.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self._round_ends = 0
        """Number of ended groups from which on the limit may change again."""

    def observe(self, loads: Sequence[EngineLoad], in_flight: int, ended: int) -> None:
        """Adjust the limit to the current `loads`, given the groups in flight and those ended since the run began.

        An overloaded engine halves the limit. Otherwise the limit grows by a sixteenth of `most`, but only if it is
        reached: if fewer groups are in flight than the limit allows, the engines were not tested at the limit.
        """
        if not loads or ended < self._round_ends:
            return
        if any(load.kv_usage > KV_USAGE_HIGH or load.queued > QUEUED_HIGH for load in loads):
            # From the groups actually in flight, so that one decrease is enough when the limit is not reached.
            self.limit = max(1, int(min(self.limit, in_flight) * BACK_OFF))
        elif in_flight >= self.limit and self.limit < self.most:
            self.limit = min(self.most, self.limit + max(1, self.most // 16))
        else:
            return
        self._round_ends = ended + self.limit
