"""Filters for `dynamic_sampling_filter_path`: `fn(args, group)`, true keeps the group (DAPO, 2503.14476).

A `Verdict` in place of a plain yes or no tells the metrics why a group went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_async.types import Sample, SampleStatus, Verdict


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Verdict:
    """False where all samples scored the same: every group-relative advantage would be 0."""
    rewards = {sample.scalar_reward for sample in samples}
    return Verdict(len(rewards) > 1, f"all_{rewards.pop():.1f}")


def check_no_aborted(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Verdict:
    """False where a sample was stopped or failed before it ended."""
    unfinished = (SampleStatus.ABORTED, SampleStatus.FAILED)
    return Verdict(all(sample.status not in unfinished for sample in samples), "aborted")


def check_no_truncated(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Verdict:
    """False where a sample was cut at `rollout_max_response_len`."""
    return Verdict(all(sample.status is not SampleStatus.TRUNCATED for sample in samples), "truncated")
