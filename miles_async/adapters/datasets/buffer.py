"""The buffer of returned groups, which come before new data (slime's `RolloutDataSourceWithBuffer`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from miles_async.identity import IdentityMap, identity_set
from miles_async.json_values import shown
from miles_async.types import Group, Sample
from miles_async.user_code import USER_CODE_ERRORS

BufferFilter = Callable[[Any, Any, list[Group], int], Sequence[list[Sample]]]
"""`fn(args, rollout_id, buffer, num_samples)` returns groups of `buffer`; `rollout_id` is None, as in slime."""
Report = Callable[[str, str], None]
"""`report(reason, sentence)` is called for each row or group that is skipped, so that nothing is lost silently."""


def pop_first(args: Any, rollout_id: Any, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove and return the oldest groups: the default buffer filter."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class Buffer:
    """Holds returned groups; `choose` is the user's buffer filter or `pop_first`.

    A filter may or may not remove the groups that it returns from the list: the buffer removes them in either case, by
    identity.
    """

    def __init__(self, choose: BufferFilter, args: Any, report: Report) -> None:
        self._choose = choose
        self._args = args
        self._report = report
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        self._groups += groups

    def take(self, num_samples: int) -> list[Group]:
        """Remove and return at most `num_samples` groups; fewer if the buffer or the filter returns fewer.

        If the filter raises, this call falls back to `pop_first`. Groups that the filter removed without returning them
        are dropped, and groups that were not in the buffer are ignored. Each of these cases is reported.
        """
        if not self._groups or not num_samples:
            return []
        if self._choose is pop_first:
            return self._take_first(num_samples)
        # A filter may remove groups from the list in place, so the contents are remembered before it runs.
        # A group is known by its first sample: a filter may copy the list, as slime code does, but not the samples.
        before = IdentityMap((group[0], group) for group in self._groups)
        offered = list(self._groups)
        try:
            picked = [group[0] for group in self._choose(self._args, None, offered, num_samples)]
            left = identity_set(group[0] for group in offered)
        except USER_CODE_ERRORS as error:
            # User code can raise any exception. Its changes to the list have no effect.
            self._report(
                "buffer_filter_raised", f"buffer_filter_path raised {shown(error)}: the oldest groups are used instead"
            )
            return self._take_first(num_samples)
        if unknown := [first for first in picked if first not in before]:
            self._report(
                "buffer_filter_unknown", f"buffer_filter_path returned {len(unknown)} groups that are not in the buffer"
            )
        chosen = [first for first in identity_set(picked) if first in before]
        returned = identity_set(chosen)
        for first, group in before.items():
            if first not in left and first not in returned:
                self._report(
                    "buffer_filter_removed", f"buffer_filter_path removed group {group.feed_index} without returning it"
                )
        # Groups beyond `num_samples` stay in the buffer, even if the filter removed them from the list.
        taken = identity_set(chosen[:num_samples])
        surplus = identity_set(chosen[num_samples:])
        kept = (first for first in before if first in surplus or (first in left and first not in taken))
        self._groups = deque(before[first] for first in kept)
        return [before[first] for first in taken]

    def take_of(self, adapter: str, num_samples: int) -> list[Group]:
        """Remove and return the oldest groups for an adapter, at most `num_samples`."""
        taken = list(islice((group for group in self._groups if group.adapter == adapter), num_samples))
        chosen = identity_set(taken)
        self._groups = deque(group for group in self._groups if group not in chosen)
        return taken

    def groups(self) -> list[Group]:
        """The waiting groups, in order."""
        return list(self._groups)

    def clear(self) -> None:
        self._groups.clear()

    def _take_first(self, num_samples: int) -> list[Group]:
        """Remove and return the oldest groups, without a look at the others."""
        return [self._groups.popleft() for _ in range(min(num_samples, len(self._groups)))]
