"""Filters for `dynamic_sampling_filter_path`: `fn(args, group) -> bool`, true keeps the group (DAPO, 2503.14476)."""

from __future__ import annotations

from typing import Any

from miles_async.types import Group


def check_reward_nonzero_std(args: Any, group: Group) -> bool:
    """False where all samples scored the same: every group-relative advantage would be 0."""
    return any(sample.reward != group[0].reward for sample in group)
