"""Which version of a LoRA adapter a request names, and which versions an engine may drop.

Each published version has another name, so engines serve several versions at once and a publish stops nothing:
requests in flight end under the version that they began with. `scheduling/bounds.py` proves how many versions an engine
holds. A run may train several adapters. Each has its own versions.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

ADAPTER_PREFIX = "v"
"""The beginning of the name of a version; its number follows."""


def name_of(version: int) -> str:
    """The name under which engines load a version, which is also that of its folder."""
    return f"{ADAPTER_PREFIX}{version}"


def version_of(name: str) -> int | None:
    """The version that has this name; None if it is the name of something else."""
    match = re.fullmatch(rf"{ADAPTER_PREFIX}(\d+)", name)
    return int(match[1]) if match else None


@dataclass(slots=True)
class PinnedVersion:
    """The version that all requests of a group name, turn after turn."""

    version: int | None = None
    """None before the first request."""


class AdapterVersions:
    """The versions that the engines of a run hold.

    Example::

        adapters = AdapterVersions(staleness=1)
        adapters.publish(7)
        pin = PinnedVersion()
        adapters.begin(pin)     # 7
        adapters.publish(8)
        adapters.begin(pin)     # 7: the next turn of the same group
        adapters.publish(9)
        adapters.idle()         # False: a request names version 7, which is too old now
    """

    def __init__(self, staleness: int, adapters: Iterable[str] = ("",), *, moves_between_turns: bool = False) -> None:
        """`staleness` is S of `scheduling/bounds.py`. With `moves_between_turns`, each turn names the newest version.

        `adapters` are the names of several adapters. Without `moves_between_turns`, a version that is not kept any more
        is also replaced by the newest one. The group is then too stale to be trained.
        """
        self.resident = staleness + 2
        """The most versions of an adapter that an engine holds: S + 1 that requests may name, and one that is being
        loaded."""
        self._moves = moves_between_turns
        self._kept: dict[str, deque[int]] = {name: deque(maxlen=staleness + 1) for name in adapters}
        """The versions of each adapter that requests may name, oldest first."""
        self._named: dict[str, Counter[int]] = {name: Counter() for name in self._kept}
        """Requests in flight of each adapter, by the version that they name."""

    @property
    def capacity(self) -> int:
        """The most versions of all adapters that an engine holds."""
        return self.resident * len(self._kept)

    def publish(self, version: int, adapter: str = "") -> None:
        """Record that every routed engine holds a version, which new groups of the adapter name from now on."""
        kept = self._kept[adapter]
        if not kept or kept[-1] < version:
            kept.append(version)

    def begin(self, pin: PinnedVersion, adapter: str = "") -> int:
        """Pin and return the version that a request names. It is in use until `end`."""
        kept, own = self._kept[adapter], pin.version
        if own is None or self._moves or own not in kept:
            pin.version = own = kept[-1] if kept else -1
        self._named[adapter][own] += 1
        return own

    def end(self, version: int, adapter: str = "") -> None:
        """Record that a request which named `version` has ended."""
        named = self._named[adapter]
        named[version] -= 1
        if not named[version]:
            del named[version]

    def idle(self, adapter: str | None = None) -> bool:
        """Whether no request names a version that is not kept any more: of an adapter, or of any if it is None."""
        names = self._kept if adapter is None else (adapter,)
        return all(version in self._kept[name] for name in names for version in self._named[name])

    def requests(self) -> dict[int, int]:
        """Requests in flight by the version that they name, for all versions that requests may name."""
        versions = {
            version: self._named[name][version]
            for name, kept in self._kept.items()
            for version in {*kept, *self._named[name]}
        }
        return dict(sorted(versions.items()))
