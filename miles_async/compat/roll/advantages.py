"""What ROLL makes of the rewards of a batch, as functions by path. Their settings are attributes of `args`.

A file of ROLL sets these attributes with `custom_args`, under ROLL's names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
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
    raw = [sample.scalar_reward for sample in samples]
    if not all(map(isfinite, raw)):
        return raw, [nan] * len(raw)
    parts = [sample.dataset for sample in samples]
    found = [0.0] * len(raw)
    for name in {*parts}:
        positions = [position for position, part in enumerate(parts) if part == name]
        members = [samples[position] for position in positions]
        values = _limited(args, members, _normalized(args, members, [raw[position] for position in positions]))
        for position, value in zip(positions, values, strict=True):
            found[position] = value
    return raw, found


def agentic_advantages(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """As `advantages`, but as in ROLL's agentic pipeline: over all data sets together, and 0 where a deviation is 0."""
    raw = [sample.scalar_reward for sample in samples]
    if not all(map(isfinite, raw)):
        return raw, [nan] * len(raw)
    values = _compared(raw, _owners(args, samples), args.norm_mean_type, args.norm_std_type)
    return raw, _limited(args, samples, values)


def step_advantages(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """As `agentic_advantages`, for trajectories whose segments are steps with a `metadata["step"]` each.

    The reward of a step is the sum of the rewards from this step to the end, discounted by `step_reward_gamma`, and all
    steps of a group count in its statistics. With `episode_reward_weight` (GiGPO, arXiv 2505.10978) an advantage is the
    sum of two parts: `episode_reward_weight` times that of the trajectory's reward, and `step_reward_weight` times that
    of the step's reward among the steps of the batch with the same state, by `state_norm_mean_type` and
    `state_norm_std_type`.
    """
    raw = [sample.scalar_reward for sample in samples]
    returns = _returns(samples, args.step_reward_gamma)
    if not all(map(isfinite, [*raw, *returns])):
        return raw, [nan] * len(raw)
    owners = _owners(args, samples)
    norms = args.norm_mean_type, args.norm_std_type
    if args.episode_reward_weight is None:
        values = _compared(returns, owners, *norms)
    else:
        states = [sample.metadata["step"]["state"] for sample in samples]
        episodes = _compared(raw, owners, *norms)
        steps = _compared(returns, states, args.state_norm_mean_type, args.state_norm_std_type)
        values = [
            args.episode_reward_weight * episode + args.step_reward_weight * step
            for episode, step in zip(episodes, steps, strict=True)
        ]
    return raw, _limited(args, samples, values)


def _returns(samples: Sequence[Sample], gamma: float) -> list[float]:
    """The discounted sum of the rewards from each step to the end of its trajectory."""
    returns: list[float] = []
    for _, steps in groupby(samples, key=lambda sample: sample.index):
        ahead, backwards = 0.0, []
        for step in reversed(list(steps)):
            ahead = step.metadata["step"]["reward"] + gamma * ahead
            backwards.append(ahead)
        returns += reversed(backwards)
    return returns


def _compared(
    values: Sequence[float], owners: Sequence[int | str], mean_type: str | None, std_type: str | None
) -> list[float]:
    """Values that are shifted and scaled as in ROLL's agentic pipeline: 0 where a deviation is 0 or is none."""
    members: dict[int | str, list[float]] = defaultdict(list)
    for owner, value in zip(owners, values, strict=True):
        members[owner].append(value)
    means = {"batch": dict.fromkeys(members, fmean(values)), None: dict.fromkeys(members, 0.0)}
    means["group"] = {owner: fmean(own) for owner, own in members.items()}
    found = []
    deviations = {owner: _deviation(values if std_type == "batch" else own) for owner, own in members.items()}
    for owner, value in zip(owners, values, strict=True):
        difference, deviation = value - means[mean_type][owner], deviations[owner]
        if std_type is not None:
            difference = difference / (deviation + EPSILON) if deviation > EPSILON else 0.0
        found.append(difference)
    return found


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _limited(args: Any, samples: Sequence[Sample], values: Sequence[float]) -> list[float]:
    """The advantages of samples with these normalized rewards."""
    values = _clipped(values, args.reward_clip)
    if args.whiten_advantages:
        values = whiten(values, [_trained_tokens(sample) for sample in samples])
    return _clipped(values, args.advantage_clip)


def _owners(args: Any, samples: Sequence[Sample]) -> list[int]:
    """The number of the group of each sample."""
    return [
        (number if sample.index is None else sample.index) // args.n_samples_per_prompt
        for number, sample in enumerate(samples)
    ]


def _normalized(args: Any, samples: Sequence[Sample], rewards: list[float]) -> list[float]:
    groups: dict[int, list[float]] = defaultdict(list)
    owners = _owners(args, samples)
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
    mean is not between `difficulty_low_threshold` and `difficulty_high_threshold`; a single sample stays. The mean is
    that of `acc` if the rewards have this entry, so that penalties do not count, and else that of the rewards.
    """
    for group in groups:
        low, high = args.difficulty_low_threshold, args.difficulty_high_threshold
        fits = not args.difficulty_mask or len(group) == 1 or low < fmean(map(_accuracy, group)) < high
        for sample in group:
            truncated = args.max_len_mask and sample.status is SampleStatus.TRUNCATED
            sample.remove_sample = sample.remove_sample or truncated or not fits


def _accuracy(sample: Sample) -> float:
    match sample.reward:
        case {"acc": float() | int() as accuracy}:
            return accuracy
    return sample.scalar_reward
