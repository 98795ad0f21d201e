"""Filters that the configuration can name; each has the signature of the setting that names it.

- `dynamic_sampling_filter_path`: `fn(args, group)` is true if the group is kept (DAPO, arXiv 2503.14476). A `Verdict`
  instead of a boolean gives a reason, by which the metrics count dropped groups. slime's and Miles'
  `DynamicFilterOutput` is read like a `Verdict`.
- `over_sampling_filter_path`: `fn(args, groups)` returns the groups in order of preference. The first
  `rollout_batch_size` groups are trained.
- `rollout_sample_filter_path`: `fn(args, groups)` sets `remove_sample` on samples and returns nothing. A removed sample
  still counts in the advantages of its group, but its own tokens are masked.

`args` is the flat configuration. Names and signatures are those of slime, so filters written for slime work unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev
from typing import Any

from miles_async.types import Group, Sample, SampleStatus, Verdict


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Verdict:
    """Drop a group whose samples all have the same reward: every group-relative advantage would be 0."""
    rewards = {sample.scalar_reward for sample in samples}
    return Verdict(len(rewards) > 1, f"all_{rewards.pop():.1f}")


def check_no_aborted(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Verdict:
    """Drop a group with a sample that was aborted or failed."""
    unfinished = (SampleStatus.ABORTED, SampleStatus.FAILED)
    return Verdict(all(sample.status not in unfinished for sample in samples), "aborted")


def check_no_truncated(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Verdict:
    """Drop a group with a sample that was truncated at `rollout_max_response_len` tokens."""
    return Verdict(all(sample.status is not SampleStatus.TRUNCATED for sample in samples), "truncated")


def sort_by_reward_std(args: Any, samples: Sequence[Group], **kwargs: Any) -> list[Group]:
    """Order groups by the standard deviation of their rewards, largest first; ties keep their order."""
    return sorted(samples, key=lambda group: pstdev(group.rewards), reverse=True)


def mask_truncated(args: Any, samples: Sequence[Sequence[Sample]]) -> None:
    """Remove truncated samples from the loss (overlong filtering of DAPO, arXiv 2503.14476)."""
    for group in samples:
        for sample in group:
            sample.remove_sample = sample.remove_sample or sample.status is SampleStatus.TRUNCATED
