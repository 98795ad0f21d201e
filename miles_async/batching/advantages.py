"""Turns the rewards of sampled responses into advantages and into the weights of their tokens in the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from miles_async.config.losses import estimator_of, loss_aggregation, normalizes_in_driver
from miles_async.config.schema import Algorithm
from miles_async.errors import TrajectoryError, UserError
from miles_async.losses.advantages.estimator import AdvantageEstimator
from miles_async.losses.advantages.statistics import whiten
from miles_async.plugins import errors_of, name_of
from miles_async.types import Group, Sample

PostProcess = Callable[[list[Sample]], Sequence[float]]
"""`(samples) -> rewards`: a user's `--custom-reward-post-process-path`, with all samples of a batch."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with its advantage and the weight of its tokens."""

    sample: Sample
    group: int
    """Number of the sample's group in the batch."""
    trajectory: int
    """Number of the sample's trajectory in the batch."""
    advantage: float
    """Advantage of every trained token of the sample. With a critic, and with REINFORCE++ and a KL penalty, the
    reward from which the learner computes the advantages."""
    reward: float = 0.0
    """Reward of the sample, with the penalty on its length."""
    loss_weight: float = 1.0
    """Factor of each trained token in the loss's sum over tokens."""


def score_samples(
    groups: Sequence[Group], algorithm: Algorithm, max_response_len: int, post_process: PostProcess | None = None
) -> list[ScoredSample]:
    """Compute the advantage of every sample, trajectory by trajectory in the order of the groups.

    A segment has the reward of its trajectory, or its own. Every trajectory counts once in the statistics of its group,
    however many segments it has. `max_response_len` is the response limit in tokens, which the overlong penalty needs.
    What `post_process` returns takes the place of what the estimator makes of rewards and penalty.

    Raises TrajectoryError if a sample has no numeric reward, or if its columns have inconsistent lengths, and UserError
    if a plug-in does not return one advantage per sample.
    """
    estimator, scored = estimator_of(algorithm), []
    first = 0
    given = None
    if post_process is not None:
        given = iter(post_process([one for group in groups for segments in group.trajectories for one in segments]))
    for number, group in enumerate(groups):
        trajectories = group.trajectories
        samples, rewards, weights, owners = [], [], [], []
        for owner, segments in enumerate(trajectories, start=first):
            penalty = _length_penalty(segments, algorithm, max_response_len)
            samples += segments
            rewards += [segment.scalar_reward + penalty for segment in segments]
            weights += [1 / len(segments)] * len(segments)
            owners += [owner] * len(segments)
        first += len(trajectories)
        advantages: Sequence[float]
        if given is None:
            advantages = _advantages(estimator, rewards, weights, algorithm)
        else:
            advantages = list(islice(given, len(samples)))
        scored += [
            ScoredSample(sample, number, owner, advantage, reward)
            for sample, owner, advantage, reward in zip(samples, owners, advantages, rewards, strict=True)
        ]
    if not normalizes_in_driver(algorithm):
        return scored
    token_counts = [len(trained_positions(one.sample)) for one in scored]
    normalized = whiten([one.advantage for one in scored], token_counts)
    return [replace(one, advantage=advantage) for one, advantage in zip(scored, normalized, strict=True)]


def _advantages(
    estimator: AdvantageEstimator, rewards: Sequence[float], weights: Sequence[float], algorithm: Algorithm
) -> Sequence[float]:
    """The advantages of a group's samples."""
    if estimator.compares_samples and not algorithm.rewards_normalization:
        return rewards
    with errors_of(estimator, "compute advantages"):
        advantages = estimator.advantages(rewards, weights, algorithm)
        given = len(advantages)
    if given != len(rewards):
        raise UserError(
            f"{name_of(estimator)} returned {given} advantages for {len(rewards)} samples: return one per sample"
        )
    return advantages


def weight_samples(
    scored: Sequence[ScoredSample], algorithm: Algorithm, max_response_len: int
) -> Sequence[ScoredSample]:
    """Set the loss weights of one optimizer step's samples according to `loss_aggregation`.

    The loss is always a weighted sum over tokens divided by the step's trained tokens, whichever way the samples are
    split into micro-batches and ranks. In a step of `n` trajectories and `T` tokens, a sample of a trajectory with `t`
    tokens in all its segments gets the weight

    - `token_mean`: 1, the mean over all tokens (DAPO, arXiv 2503.14476);
    - `sequence_mean`: `T / (n t)`, the mean over trajectories of each one's mean (GRPO, arXiv 2402.03300);
    - `sequence_sum`: `T / n`, the mean over trajectories of each one's sum;
    - `constant`: `T / (n max_response_len)`, every trajectory's sum over one constant (Dr. GRPO, arXiv 2503.20783).

    Without `count_removed_samples`, `n` is the number of trajectories with a trained token.
    """
    aggregation = loss_aggregation(algorithm)
    if aggregation == "token_mean":
        return scored
    token_counts: Counter[int] = Counter()
    for one in scored:
        token_counts[one.trajectory] += len(trained_positions(one.sample))
    trained = sum(map(bool, token_counts.values()))
    counted = len(token_counts) if algorithm.count_removed_samples else max(trained, 1)
    tokens_per_trajectory = max(token_counts.total(), 1) / counted
    by_sequence = aggregation == "sequence_mean"
    constant = max_response_len if aggregation == "constant" else 1
    divisors = token_counts if by_sequence else dict.fromkeys(token_counts, constant)
    return [replace(one, loss_weight=tokens_per_trajectory / max(divisors[one.trajectory], 1)) for one in scored]


def trained_positions(sample: Sample) -> NDArray[np.int64]:
    """[m] positions within the response whose loss mask is 1; none if the sample is marked for removal.

    Raises TrajectoryError if tokens, mask and log-probabilities have inconsistent lengths.
    """
    response = sample.response_length
    masked = response if sample.loss_mask is None else len(sample.loss_mask)
    # The first response token is predicted from the last prompt token, so the prompt needs at least one token.
    if not masked == len(sample.rollout_log_probs) == response <= len(sample.tokens) - 1:
        raise TrajectoryError(
            f"sample {sample.index} has {len(sample.tokens)} tokens ({response} in the response), {masked} mask "
            f"entries and {len(sample.rollout_log_probs)} log-probabilities; give mask and log-probabilities one entry "
            "per response token, and the prompt at least one token"
        )
    if sample.remove_sample:
        return np.empty(0, np.int64)
    return np.arange(response) if sample.loss_mask is None else np.flatnonzero(np.asarray(sample.loss_mask))


def _length_penalty(segments: Sequence[Sample], algorithm: Algorithm, max_response_len: int) -> float:
    if algorithm.overlong_buffer_len is None:
        return 0.0
    # The limit holds for each segment, so the longest one counts.
    length = max(segment.response_length for segment in segments)
    penalty = overlong_penalty(length, longest=max_response_len, buffer=algorithm.overlong_buffer_len)
    return algorithm.overlong_penalty * penalty


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """Reward of a response's length in tokens: 0 up to `longest - buffer`, then linearly down to -1 at `longest`.

    Source: soft overlong punishment, DAPO (arXiv 2503.14476), equation 13.
    """
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
