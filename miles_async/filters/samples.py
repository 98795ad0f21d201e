"""Filters for `rollout_sample_filter_path`: `fn(args, groups)` marks samples with `remove_sample`; nothing is returned.

A marked sample still counts in its group's advantages; its own tokens are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_async.types import Sample, SampleStatus


def mask_truncated(args: Any, samples: Sequence[Sequence[Sample]]) -> None:
    """Nothing is learned from an answer that was cut (overlong filtering of DAPO, 2503.14476)."""
    for group in samples:
        for sample in group:
            sample.remove_sample = sample.remove_sample or sample.status is SampleStatus.TRUNCATED
