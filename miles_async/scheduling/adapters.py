"""Which version of a LoRA adapter a request names, and which versions an engine may drop.

Each published version has another name, so engines serve several versions at once and a publish stops nothing:
requests in flight end under the version that they began with. `scheduling/bounds.py` proves how many versions an engine
holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class PinnedVersion:
    """The version that all requests of a group name, turn after turn."""

    version: int | None = None
    """None before the first request."""


class AdapterVersions:
    """The versions that the engines of a run hold.

    Example::

        adapters = AdapterVersions(staleness=1)
        adapters.live = 7
        pin = PinnedVersion()
        adapters.begin(pin)     # 7
        adapters.live = 8
        adapters.begin(pin)     # 7: the next turn of the same group
        adapters.idle_below(8)  # False
    """

    def __init__(self, staleness: int, *, moves_between_turns: bool = False) -> None:
        """`staleness` is S of `scheduling/bounds.py`. With `moves_between_turns`, each turn names the newest version.

        Without, a version that is not kept any more is also replaced by the newest one. The group is then too stale to
        be trained.
        """
        self.live = -1
        """The newest version that every routed engine holds; -1 before the first publish."""
        self.resident = staleness + 2
        """The most versions that an engine holds: S + 1 that requests may name, and one that is being loaded."""
        self._staleness = staleness
        self._moves = moves_between_turns
        self._named: Counter[int] = Counter()
        """Requests in flight, by the version that they name."""

    def begin(self, pin: PinnedVersion) -> int:
        """Pin and return the version that a request names. It is in use until `end`."""
        own = pin.version
        if own is None or self._moves or not self.live - self._staleness <= own <= self.live:
            pin.version = own = self.live
        self._named[own] += 1
        return own

    def end(self, version: int) -> None:
        """Record that a request which named `version` has ended."""
        self._named[version] -= 1
        if not self._named[version]:
            del self._named[version]

    def idle_below(self, oldest: int) -> bool:
        """Whether no request names a version below `oldest`."""
        return all(version >= oldest for version in self._named)

    def requests(self) -> dict[int, int]:
        """Requests in flight by the version that they name, for all versions that requests may name."""
        current = range(max(0, self.live - self._staleness), self.live + 1)
        return {version: self._named[version] for version in sorted({*current, *self._named})}
