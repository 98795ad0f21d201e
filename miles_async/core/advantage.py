"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

_EPSILON = 1e-6
"""Keeps groups of almost equal rewards from blowing up under std normalization."""


def group_advantages(rewards: Sequence[float], *, std_normalization: bool) -> list[float]:
    """Each reward minus its group's mean, divided by the group's standard deviation if asked.

    `rewards` are those of one prompt's samples. Equal rewards give zeros: such a group teaches nothing.
    Source: GRPO, DeepSeekMath (arXiv 2402.03300); without the division Dr. GRPO (arXiv 2503.20783), which shows
    that dividing favours prompts that are nearly solved or nearly hopeless.
    """
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)  # exactly: the mean of equal floats may be off by one bit
    mean = fmean(rewards)
    if not std_normalization:
        return [reward - mean for reward in rewards]
    scale = pstdev(rewards, mean) + _EPSILON
    return [(reward - mean) / scale for reward in rewards]
