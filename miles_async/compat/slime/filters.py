"""slime's and Miles' names for dynamic filters (`rollout/filter_hub`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_async.filters import check_no_aborted, check_reward_nonzero_std
from miles_async.types import Sample, Verdict

__all__ = [
    "DynamicFilterOutput",
    "MetricGatherer",
    "call_dynamic_filter",
    "check_no_aborted",
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
    "should_drop_dynamic_filter_output",
]


@dataclass
class DynamicFilterOutput:
    """What a dynamic filter returns; the run reads it as a `Verdict`, which filters may return instead."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Keep a rejected group if too few candidates for the batch would be left without it."""


class MetricGatherer:
    """Counts the groups that a filter rejected, by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a group. One without a reason is not counted."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """The counts, by slime's names of the metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter, and return its result in slime's form. Without a filter, the group is kept."""
    verdict = Verdict(True) if fn is None else Verdict.of(fn(*args, **kwargs))
    reason = None if verdict.keep else verdict.reason
    return DynamicFilterOutput(verdict.keep, reason, verdict.keep_when_insufficient)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether to drop a group: `remaining_batch_size` candidates are left for a batch of `target_data_size` groups."""
    needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not needed


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Verdict:
    """`check_reward_nonzero_std`, except that a rejected group is kept if too few candidates would be left."""
    return check_reward_nonzero_std(args, samples, **kwargs)._replace(keep_when_insufficient=True)
