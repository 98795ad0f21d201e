"""What a learner rank is handed for one drained batch: packed columns, ready to train, cheap to send.

Built once, on the driver, from all groups of the batch: advantages and packing see the whole of it before it is cut up
for the ranks. Only NumPy, so that whoever builds batches need not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_async.config.schema import RunConfig
from miles_async.core.advantage import group_advantages
from miles_async.core.packing import pack
from miles_async.errors import BadTrajectory, UserError
from miles_async.types import Group, Sample


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end, without padding. T tokens, n sequences, m trained tokens."""

    tokens: NDArray[np.int64]
    """[T] prompt and response ids of one sequence after the other."""
    lengths: NDArray[np.int64]
    """[n] tokens of each sequence."""
    targets: NDArray[np.int64]
    """[m] places in `tokens` of the tokens that are trained; each is predicted at the place before it."""
    rollout_logprobs: NDArray[np.float32]
    """[m] log-probabilities that the engines reported; empty in supervised batches, like the next."""
    advantages: NDArray[np.float32]
    """[m] advantage of each token's sample."""


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One optimizer step, as one rank sees it."""

    micro_batches: list[PackedBatch]
    """Equally many on all ranks."""
    total_tokens: int
    """Trained tokens of the step over all ranks and micro-batches: what the loss is divided by."""


def rank_shares(groups: Sequence[Group], config: RunConfig, world_size: int) -> list[list[TrainStep]]:
    """What each learner rank trains of a drained batch: `result[rank][step]`; ranks that share layers get the same.

    Raises BadTrajectory as `policy_steps` does, UserError when the batch cannot be cut as the configuration asks.
    """
    shards = config.learner.tensor_model_parallel_size
    try:
        shares = policy_steps(
            groups,
            steps=config.learner.num_steps_per_rollout,
            ranks=world_size // shards,
            max_tokens=config.learner.max_tokens_per_gpu,
            std_normalization=config.algorithm.grpo_std_normalization,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return [share for share in shares for _ in range(shards)]


def policy_steps(
    groups: Sequence[Group], *, steps: int, ranks: int, max_tokens: int, std_normalization: bool
) -> list[list[TrainStep]]:
    """`steps` optimizer steps for each of `ranks` data-parallel ranks: `result[rank][step]`.

    Samples go to the steps in the order of their index. Raises BadTrajectory when a sample has no reward or its
    columns do not fit together, ValueError when packing cannot be done (see `core.packing.pack`) or the samples do
    not divide by `steps`.
    """
    samples: list[tuple[Sample, float]] = []
    for group in groups:
        rewards = [sample.scalar_reward for sample in group]
        samples += zip(group, group_advantages(rewards, std_normalization=std_normalization), strict=True)
    if len(samples) % steps:
        raise ValueError(f"{len(samples)} samples do not divide into num_steps_per_rollout={steps} equal steps")
    samples.sort(key=lambda pair: -1 if pair[0].index is None else pair[0].index)
    share = len(samples) // steps
    cut = [_cut(samples[start : start + share], ranks, max_tokens) for start in range(0, len(samples), share)]
    return [[step[rank] for step in cut] for rank in range(ranks)]


def _cut(samples: Sequence[tuple[Sample, float]], ranks: int, max_tokens: int) -> list[TrainStep]:
    bins_of_ranks = pack([len(sample.tokens) for sample, _ in samples], max_tokens, ranks)
    packed = [[pack_samples([samples[i] for i in bin_]) for bin_ in bins] for bins in bins_of_ranks]
    total = sum(len(batch.targets) for batches in packed for batch in batches)
    return [TrainStep(batches, max(total, 1)) for batches in packed]


def pack_samples(samples: Sequence[tuple[Sample, float]]) -> PackedBatch:
    """Columns of samples and their advantages; of no sample at all: one token that teaches nothing, to keep step."""
    if not samples:
        return pack_sequences([[0]], [1])
    lengths = np.array([len(sample.tokens) for sample, _ in samples], np.int64)
    ends = np.cumsum(lengths)
    targets, logprobs, advantages = [], [], []
    for (sample, advantage), end in zip(samples, ends, strict=True):
        trained = _trained(sample)
        targets.append(end - sample.response_length + trained)
        logprobs.append(np.array(sample.rollout_log_probs, np.float32)[trained])
        advantages.append(np.full(len(trained), advantage, np.float32))
    return PackedBatch(
        tokens=np.concatenate([np.array(sample.tokens, np.int64) for sample, _ in samples]),
        lengths=lengths,
        targets=np.concatenate(targets),
        rollout_logprobs=np.concatenate(logprobs),
        advantages=np.concatenate(advantages),
    )


def _trained(sample: Sample) -> NDArray[np.int64]:
    """Places within the response whose loss mask is 1."""
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    if sample.remove_sample:
        mask = [0] * sample.response_length
    if not len(mask) == len(sample.rollout_log_probs) == sample.response_length <= len(sample.tokens) - 1:
        raise BadTrajectory(
            f"sample {sample.index}: {len(sample.tokens)} tokens, {sample.response_length} of them response, "
            f"{len(mask)} mask entries, {len(sample.rollout_log_probs)} log-probabilities; mask and "
            "log-probabilities need one entry per response token, and a prompt at least one token"
        )
    return np.flatnonzero(np.array(mask, np.int64))


def supervised_step(prompts: Sequence[list[int]], responses: Sequence[list[int]], *, max_tokens: int) -> TrainStep:
    """One supervised step of one rank: every response token is trained."""
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    [bins] = pack([len(sequence) for sequence in sequences], max_tokens)
    batches = [pack_sequences([sequences[i] for i in bin_], [len(prompts[i]) for i in bin_]) for bin_ in bins]
    return TrainStep(batches, sum(map(len, responses)))


def pack_sequences(sequences: Sequence[list[int]], firsts: Sequence[int]) -> PackedBatch:
    """Sequences whose tokens from place `firsts[i]` on are targets; without rollout columns."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    starts = np.cumsum(lengths) - lengths
    spans = zip(starts, firsts, lengths, strict=True)
    return PackedBatch(
        tokens=np.concatenate([np.array(sequence, np.int64) for sequence in sequences]),
        lengths=lengths,
        targets=np.concatenate([np.arange(start + first, start + length) for start, first, length in spans]),
        rollout_logprobs=np.zeros(0, np.float32),
        advantages=np.zeros(0, np.float32),
    )
