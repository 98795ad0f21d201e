"""Statistics of rewards: differences to the mean of a group, and normalization."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, isfinite, nan, sqrt
from statistics import fmean

EPSILON = 1e-6
"""Added to standard deviations, so that almost equal rewards do not give huge advantages."""
_LEAST_DEVIATION = 1e-4
"""By what whitening divides equal values. Its square is added to variances, as in slime, verl and ROLL."""


def group_advantages(rewards: Sequence[float], weights: Sequence[float], *, std_normalization: bool) -> list[float]:
    """Subtract the group's mean from each reward and, with `std_normalization`, divide by the standard deviation.

    `rewards` belong to the samples of one prompt, and `weights` are their weights in both statistics. The deviation is
    that of a sample of n, with n - 1, as in slime, verl and TRL. A group of one has none, so it is not divided by it.
    Equal rewards give zeros. If any reward is not finite, all advantages are NaN, so that the learner skips the step.
    Source: GRPO, DeepSeekMath (arXiv 2402.03300). Without the division it is Dr. GRPO (arXiv 2503.20783), which shows
    that dividing favours prompts that are nearly solved or nearly hopeless.
    """
    if not all(map(isfinite, rewards)):
        return [nan] * len(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)  # the mean of equal floats may be off by one bit
    mean, others = fmean(rewards, weights), sum(weights) - 1
    # The weights of segments add up to one with a rounding error.
    scale = _deviation(rewards, weights, mean, others) + EPSILON if std_normalization and others > EPSILON else 1.0
    return [(reward - mean) / scale for reward in rewards]


def whiten(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Shift `values` by their weighted mean, and divide them by `whitening_deviation`.

    With the number of trained tokens of each sample as weight this is the normalization over all tokens of the batch
    of REINFORCE++ (arXiv 2501.03262). Equal values give zeros. If any value is not finite, all results are NaN.
    """
    if not all(map(isfinite, values)):
        return [nan] * len(values)
    total = sum(weights)
    if not total or max(values) == min(values):
        return [0.0] * len(values)
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    scale = whitening_deviation(_deviation(values, weights, mean, total), total)
    return [(value - mean) / scale for value in values]


def whitening_deviation(deviation: float, count: float) -> float:
    """By what whitening divides `count` values with this standard deviation: that of a sample, with n - 1."""
    return hypot(deviation * sqrt(count / max(count - 1, 1)), _LEAST_DEVIATION)


def _deviation(values: Sequence[float], weights: Sequence[float], mean: float, count: float) -> float:
    """The square root of the weighted sum of squared differences to `mean`, divided by `count`."""
    # hypot scales its arguments: huge rewards do not overflow when squared.
    return hypot(*(sqrt(weight / count) * (value - mean) for value, weight in zip(values, weights, strict=True)))
