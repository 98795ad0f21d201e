"""From rewards to advantages, and the rewards' own corrections."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, isfinite, nan, sqrt
from statistics import fmean, pstdev

_EPSILON = 1e-6
"""Keeps groups of almost equal rewards from blowing up under std normalization."""


def group_advantages(rewards: Sequence[float], *, std_normalization: bool) -> list[float]:
    """Each reward minus its group's mean, divided by the group's standard deviation if asked.

    `rewards` are those of one prompt's samples. Equal rewards give zeros: such a group teaches nothing. One that is not
    finite makes all of them NaN, so that the learner skips the step.
    Source: GRPO, DeepSeekMath (arXiv 2402.03300); without the division Dr. GRPO (arXiv 2503.20783), which shows
    that dividing favours prompts that are nearly solved or nearly hopeless.
    """
    if not all(map(isfinite, rewards)):
        return [nan] * len(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)  # exactly: the mean of equal floats may be off by one bit
    mean = fmean(rewards)
    if not std_normalization:
        return [reward - mean for reward in rewards]
    scale = pstdev(rewards) + _EPSILON
    return [(reward - mean) / scale for reward in rewards]


def whiten(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """`values` moved and scaled so that their weighted mean is 0 and their weighted variance 1.

    With the trained tokens of each sample as weights this is the normalization over the tokens of the whole batch of
    REINFORCE++ (arXiv 2501.03262): no group's spread is divided by, so none is favoured. Equal values give zeros;
    one that is not finite makes all of them NaN.
    """
    if not all(map(isfinite, values)):
        return [nan] * len(values)
    total = sum(weights)
    if not total or max(values) == min(values):
        return [0.0] * len(values)
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    deviations = (sqrt(weight / total) * (value - mean) for value, weight in zip(values, weights, strict=True))
    scale = hypot(*deviations) + _EPSILON
    return [(value - mean) / scale for value in values]


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """0 up to `longest - buffer` response tokens, then in a straight line down to -1 at `longest`.

    Source: soft overlong punishment, DAPO (arXiv 2503.14476), equation 13.
    """
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
