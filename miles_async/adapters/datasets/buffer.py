"""Groups that came back and go out again before anything new (slime's `RolloutDataSourceWithBuffer`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from miles_async.types import Group, Sample

BufferFilter = Callable[[Any, Any, list[Group], int], Sequence[list[Sample]]]
"""`fn(args, rollout_id, buffer, num_samples)` picks groups; slime's own leave `rollout_id` None."""
Report = Callable[[str, str], None]
"""`(reason, sentence)`."""


def pop_first(args: Any, rollout_id: Any, buffer: list[Group], num_samples: int) -> list[Group]:
    """First in, first out."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class Buffer:
    """What `choose` picks is removed by identity, whether or not `choose` removed it from the list itself."""

    def __init__(self, choose: BufferFilter, args: Any, report: Report) -> None:
        self._choose = choose
        self._args = args
        self._report = report
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        self._groups += groups

    def take(self, num_samples: int) -> list[Group]:
        """At most `num_samples` groups, fewer where the buffer or the filter gives fewer.

        A filter that raises is reported and passed over for this once; so are groups that it took out of the buffer
        and did not return, which are gone, and groups that it made up.
        """
        if not self._groups or not num_samples:
            return []
        before = {_identity(group): group for group in self._groups}
        try:
            picked = [_identity(group) for group in self._choose(self._args, None, self._groups, num_samples)]
        except Exception as error:
            # The user's code may raise anything. Nothing it did to the list counts.
            self._report("buffer_filter_raised", f"buffer_filter_path raised {error!r}: first in, first out this time")
            self._groups = list(before.values())
            return pop_first(self._args, None, self._groups, num_samples)
        if unknown := [key for key in picked if key not in before]:
            self._report(
                "buffer_filter_unknown", f"buffer_filter_path returned {len(unknown)} groups of its own making"
            )
        chosen = [key for key in dict.fromkeys(picked) if key in before]
        left = {_identity(group) for group in self._groups}
        for key, group in before.items():
            if key not in left and key not in chosen:
                self._report("buffer_filter_removed", f"buffer_filter_path threw group {group.feed_index} away")
        surplus = chosen[num_samples:]
        kept = left.difference(chosen).union(surplus)
        self._groups = [group for key, group in before.items() if key in kept]
        return [before[key] for key in chosen[:num_samples]]

    def state(self) -> list[dict[str, Any]]:
        return [
            {"feed_index": group.feed_index, "attempt": group.attempt, "samples": [s.to_dict() for s in group]}
            for group in self._groups
        ]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        """Its groups begin afresh: they may hold tokens of weight versions that another run counted."""
        self._groups = [
            Group(map(Sample.from_dict, group["samples"]), feed_index=group["feed_index"], attempt=group["attempt"])
            for group in state
        ]
        for group in self._groups:
            group.reset()


def _identity(group: list[Sample]) -> int:
    """A filter may return copies of the lists, but the samples in them are the buffer's own."""
    return id(group[0])
