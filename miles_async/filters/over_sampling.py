"""Filters for `over_sampling_filter_path`: `fn(args, groups)` orders them, and the first of them are trained."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev
from typing import Any

from miles_async.types import Group


def sort_by_reward_std(args: Any, samples: Sequence[Group], **kwargs: Any) -> list[Group]:
    """Those whose samples disagree most come first; equals keep their order."""
    return sorted(samples, key=lambda group: pstdev(sample.scalar_reward for sample in group), reverse=True)
