"""What ROLL makes of the rewards of a batch, as functions by path. Their settings are attributes of `args`.

A file of ROLL sets these attributes with `custom_args`, under ROLL's names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite, nan
from statistics import fmean, stdev
from typing import Any

from miles_async.losses.advantages.statistics import EPSILON, whiten
from miles_async.types import Group, Sample, SampleStatus


def advantages(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """The rewards of a batch, and the advantage of each sample, for `custom_reward_post_process_path`.

    Rewards are shifted by the mean and divided by the standard deviation of `norm_mean_type` and `norm_std_type`
    ("group", "batch" or None), and clipped to ±`reward_clip`. With `whiten_advantages`, they then get mean 0 and
    variance 1 over the trained tokens of the batch. They are clipped to ±`advantage_clip` in the end. With several data
    sets, all of this is done for each of them separately. If a reward is not finite, all advantages are NaN, so that
    the learner skips the step.
    """
    return _advantages(args, samples, [sample.dataset for sample in samples])


def agentic_advantages(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """As `advantages`, but over all data sets together, as in ROLL's agentic pipeline."""
    return _advantages(args, samples, [""] * len(samples))


def _advantages(args: Any, samples: Sequence[Sample], parts: Sequence[str]) -> tuple[list[float], list[float]]:
    raw = [sample.scalar_reward for sample in samples]
    if not all(map(isfinite, raw)):
        return raw, [nan] * len(raw)
    found = [0.0] * len(raw)
    for name in {*parts}:
        positions = [position for position, part in enumerate(parts) if part == name]
        members = [samples[position] for position in positions]
        values = _clipped(_normalized(args, members, [raw[position] for position in positions]), args.reward_clip)
        if args.whiten_advantages:
            values = whiten(values, [_trained_tokens(sample) for sample in members])
        for position, value in zip(positions, _clipped(values, args.advantage_clip), strict=True):
            found[position] = value
    return raw, found


def _normalized(args: Any, samples: Sequence[Sample], rewards: list[float]) -> list[float]:
    groups: dict[int, list[float]] = defaultdict(list)
    owners = [
        (number if sample.index is None else sample.index) // args.n_samples_per_prompt
        for number, sample in enumerate(samples)
    ]
    for owner, reward in zip(owners, rewards, strict=True):
        groups[owner].append(reward)
    of_batch = _statistics(rewards)
    of_groups = {owner: _statistics(of_group) for owner, of_group in groups.items()}
    normalized = []
    for owner, reward in zip(owners, rewards, strict=True):
        known = {"group": of_groups[owner], "batch": of_batch, None: (0.0, 1.0)}
        shift, scale = known[args.norm_mean_type][0], known[args.norm_std_type][1]
        normalized.append((reward - shift) / scale)
    return normalized


def _statistics(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation by which differences are divided; a single reward has none."""
    return fmean(rewards), stdev(rewards) + EPSILON if len(rewards) > 1 else 1.0


def _clipped(values: Sequence[float], limit: float | None) -> list[float]:
    return list(values) if not limit else [max(-limit, min(limit, value)) for value in values]


def _trained_tokens(sample: Sample) -> int:
    if sample.remove_sample:
        return 0
    return sample.response_length if sample.loss_mask is None else sum(map(bool, sample.loss_mask))


def mask(args: Any, groups: Sequence[Group]) -> None:
    """Remove samples from the loss, for `rollout_sample_filter_path`.

    With `max_len_mask`, truncated samples are removed. With `difficulty_mask`, all samples of a group are removed whose
    mean reward is not between `difficulty_low_threshold` and `difficulty_high_threshold`; a single sample stays.
    """
    for group in groups:
        low, high = args.difficulty_low_threshold, args.difficulty_high_threshold
        fits = not args.difficulty_mask or len(group) == 1 or low < fmean(group.rewards) < high
        for sample in group:
            truncated = args.max_len_mask and sample.status is SampleStatus.TRUNCATED
            sample.remove_sample = sample.remove_sample or truncated or not fits
