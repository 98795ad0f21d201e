"""What a learner rank is handed for one drained batch: columns laid out, ready to train, cheap to send.

Built once, on the driver, from all groups of the batch: advantages and packing see the whole of it before it is cut up
for the ranks. Only NumPy, so that whoever builds batches need not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from miles_async.batching.advantages import group_advantages, overlong_penalty, whiten
from miles_async.batching.layout import Padding, attention_crossover, forward_layout, training_layout
from miles_async.batching.packing import PackingReport
from miles_async.config.derived import data_parallel_rank, data_parallel_ranks
from miles_async.config.schema import Algorithm, Learner, RunConfig
from miles_async.errors import TrajectoryError, UserError
from miles_async.types import Group, Sample

NO_VERSION = -1
"""Of a trained token that no span covers."""

_NO_PADDING = Padding()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end. T tokens, n sequences, m trained tokens."""

    tokens: NDArray[np.int64]
    """[T] prompt and response ids of one sequence after the other, each followed by its padding where rows are asked
    for."""
    lengths: NDArray[np.int64]
    """[n] tokens of each sequence, its padding included: a multiple of `sequence_unit`."""
    targets: NDArray[np.int64]
    """[m] places in `tokens` of the tokens that are trained, rising; each is predicted at the place before it."""
    rollout_log_probs: NDArray[np.float32]
    """[m] log-probabilities that the engines reported; empty in supervised batches, like the next three."""
    advantages: NDArray[np.float32]
    """[m] advantage of each token's sample; under ppo its reward, which becomes advantages where the critic is."""
    loss_weights: NDArray[np.float32]
    """[m] how much each token counts in the loss's sum over tokens; ones make a mean over the step's tokens."""
    versions: NDArray[np.int64]
    """[m] weight version that sampled each token, or NO_VERSION."""
    padding: int = 0
    """How many of the T tokens are padding."""

    @property
    def sequences(self) -> NDArray[np.int64]:
        """[m] the number of the sequence that each trained token belongs to, rising."""
        return np.searchsorted(np.cumsum(self.lengths), self.targets, side="right")


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One optimizer step, as one rank sees it."""

    micro_batches: list[PackedBatch]
    """Equally many on all ranks."""
    total_tokens: int
    """Trained tokens of the step over all ranks and micro-batches: what the loss is divided by."""
    packing: PackingReport | None = None
    """How well the step's samples fit; None for supervised steps."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample and what it teaches."""

    sample: Sample
    advantage: float
    loss_weight: float = 1.0
    """See `PackedBatch.loss_weights`."""


def rank_batches(groups: Sequence[Group], config: RunConfig, world_size: int) -> list[list[TrainStep]]:
    """What each learner rank trains of a drained batch: `result[rank][step]`.

    Ranks that share layers or sequences, or are stages of one pipeline, get the same.

    Raises TrajectoryError as `policy_steps` does, UserError when the batch cannot be cut as the configuration asks.
    """
    learner = config.learner
    try:
        shares = policy_steps(groups, config, ranks=data_parallel_ranks(learner, world_size))
    except ValueError as error:
        raise UserError(str(error)) from error
    return [shares[data_parallel_rank(learner, rank, world_size)] for rank in range(world_size)]


def policy_steps(groups: Sequence[Group], config: RunConfig, *, ranks: int) -> list[list[TrainStep]]:
    """`num_steps_per_rollout` optimizer steps for each of `ranks` data-parallel ranks: `result[rank][step]`.

    Samples go to the steps in the order of their index, so that no step is a class of lengths. Raises TrajectoryError
    when a sample has no reward or its columns do not fit together, ValueError when a sample does not fit into a
    micro-batch or the samples do not divide into the steps.
    """
    steps = config.learner.num_steps_per_rollout
    longest = config.rollout.rollout_max_response_len
    scored = score_samples(groups, config.algorithm, longest)
    if len(scored) % steps:
        raise ValueError(f"{len(scored)} samples do not divide into num_steps_per_rollout={steps} equal steps")
    scored.sort(key=lambda one: -1 if one.sample.index is None else one.sample.index)
    size = len(scored) // steps
    crossover = attention_crossover(config.model) if ranks > 1 else float("inf")
    cut = [
        _cut(_weighed(scored[start : start + size], config.algorithm, longest), config.learner, ranks, crossover)
        for start in range(0, len(scored), size)
    ]
    return [[step[rank] for step in cut] for rank in range(ranks)]


def score_samples(groups: Sequence[Group], algorithm: Algorithm, longest: int) -> list[ScoredSample]:
    """Every sample with its advantage; `longest` is the response limit in tokens."""
    estimator, scored = algorithm.advantage_estimator, []
    for group in groups:
        rewards = [sample.scalar_reward + _shaping(sample, algorithm, longest) for sample in group]
        if estimator in ("reinforce_plus_plus", "ppo"):
            advantages = rewards
        else:
            divided = algorithm.grpo_std_normalization and estimator != "reinforce_plus_plus_baseline"
            advantages = group_advantages(rewards, std_normalization=divided)
        scored += [ScoredSample(sample, advantage) for sample, advantage in zip(group, advantages, strict=True)]
    if not estimator.startswith("reinforce_plus_plus"):
        return scored
    tokens = [len(_trained(one.sample)) for one in scored]
    normal = whiten([one.advantage for one in scored], tokens)
    return [ScoredSample(one.sample, advantage) for one, advantage in zip(scored, normal, strict=True)]


def _shaping(sample: Sample, algorithm: Algorithm, longest: int) -> float:
    if algorithm.overlong_buffer_len is None:
        return 0.0
    buffer = algorithm.overlong_buffer_len
    return algorithm.overlong_penalty * overlong_penalty(sample.response_length, longest=longest, buffer=buffer)


def _weighed(scored: Sequence[ScoredSample], algorithm: Algorithm, longest: int) -> Sequence[ScoredSample]:
    """The shares that make the sum over tokens, divided by the step's tokens, the aggregation asked for."""
    if algorithm.loss_aggregation == "token_mean":
        return scored
    tokens = [len(_trained(one.sample)) for one in scored]
    per_sample = max(sum(tokens), 1) / len(scored)
    divisors = tokens if algorithm.loss_aggregation == "sequence_mean" else [longest] * len(scored)
    return [
        ScoredSample(one.sample, one.advantage, per_sample / max(divisor, 1))
        for one, divisor in zip(scored, divisors, strict=True)
    ]


def _cut(scored: Sequence[ScoredSample], learner: Learner, ranks: int, crossover: float) -> list[TrainStep]:
    layout = training_layout([len(one.sample.tokens) for one in scored], learner, ranks, crossover)
    packed = [
        [pack_samples([scored[i] for i in bin_], pad) for bin_, pad in zip(bins, layout.paddings, strict=True)]
        for bins in layout.bins
    ]
    total = sum(len(batch.targets) for batches in packed for batch in batches)
    return [TrainStep(batches, max(total, 1), layout.report) for batches in packed]


def pack_samples(scored: Sequence[ScoredSample], pad: Padding = _NO_PADDING) -> PackedBatch:
    """Columns of samples; of no sample at all: as little as can be computed, to keep step."""
    if not scored:
        return pack_sequences([], [], pad)
    tokens, lengths, padding = _laid_out([one.sample.tokens for one in scored], pad)
    starts = np.cumsum(lengths) - lengths
    targets, logprobs, advantages, shares, versions = [], [], [], [], []
    for one, start in zip(scored, starts, strict=True):
        trained = _trained(one.sample)
        targets.append(start + one.sample.prompt_length + trained)
        logprobs.append(np.array(one.sample.rollout_log_probs, np.float32)[trained])
        advantages.append(np.full(len(trained), one.advantage, np.float32))
        shares.append(np.full(len(trained), one.loss_weight, np.float32))
        versions.append(_versions(one.sample)[trained])
    return PackedBatch(
        tokens=tokens,
        lengths=lengths,
        targets=np.concatenate(targets),
        rollout_log_probs=np.concatenate(logprobs),
        advantages=np.concatenate(advantages),
        loss_weights=np.concatenate(shares),
        versions=np.concatenate(versions),
        padding=padding,
    )


def _laid_out(sequences: Sequence[list[int]], pad: Padding) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Tokens, lengths, and how many of the tokens are padding. Causal attention never looks at what follows."""
    missing = [pad.length(len(sequence)) - len(sequence) for sequence in sequences]
    rows = [np.pad(np.array(row, np.int64), (0, more)) for row, more in zip(sequences, missing, strict=True)]
    return np.concatenate(rows), np.array([len(row) for row in rows], np.int64), sum(missing)


def _versions(sample: Sample) -> NDArray[np.int64]:
    versions = np.full(sample.response_length, NO_VERSION, np.int64)
    for span in sample.spans:
        versions[span.start : span.end] = span.version
    return versions


def _trained(sample: Sample) -> NDArray[np.int64]:
    """Places within the response whose loss mask is 1."""
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    if sample.remove_sample:
        mask = [0] * sample.response_length
    if not len(mask) == len(sample.rollout_log_probs) == sample.response_length <= len(sample.tokens) - 1:
        raise TrajectoryError(
            f"sample {sample.index}: {len(sample.tokens)} tokens, {sample.response_length} of them response, "
            f"{len(mask)} mask entries, {len(sample.rollout_log_probs)} log-probabilities; mask and "
            "log-probabilities need one entry per response token, and a prompt at least one token"
        )
    return np.flatnonzero(np.array(mask, np.int64))


def supervised_step(prompts: Sequence[list[int]], responses: Sequence[list[int]], learner: Learner) -> TrainStep:
    """One supervised step of one rank: every response token is trained."""
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    layout = training_layout([len(sequence) for sequence in sequences], learner, 1)
    batches = [
        pack_sequences([sequences[i] for i in bin_], [len(prompts[i]) for i in bin_], pad)
        for bin_, pad in zip(layout.bins[0], layout.paddings, strict=True)
    ]
    return TrainStep(batches, sum(map(len, responses)))


def pack_sequences(sequences: Sequence[list[int]], firsts: Sequence[int], pad: Padding = _NO_PADDING) -> PackedBatch:
    """Sequences whose tokens from place `firsts[i]` on are targets; without rollout columns.

    Without any sequence: one token that is nobody's target.
    """
    if not sequences:
        sequences, firsts = [[0]], [1]
    tokens, lengths, padding = _laid_out(sequences, pad)
    starts = np.cumsum(lengths) - lengths
    spans = zip(starts, firsts, map(len, sequences), strict=True)
    none = np.zeros(0, np.float32)
    return PackedBatch(
        tokens=tokens,
        lengths=lengths,
        targets=np.concatenate([np.arange(start + first, start + length) for start, first, length in spans]),
        rollout_log_probs=none,
        advantages=none,
        loss_weights=none,
        versions=np.zeros(0, np.int64),
        padding=padding,
    )


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Sequences of several micro-batches, laid out anew for work without gradients."""

    batch: PackedBatch
    target_indices: NDArray[np.int64]
    """[m] where each of its targets stands among the targets of those micro-batches, one after the other."""


def repack_for_forward(batches: Sequence[PackedBatch], learner: Learner) -> list[ForwardBatch]:
    sequences: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []  # within the sequence
    for batch in batches:
        starts = np.cumsum(batch.lengths) - batch.lengths
        counts = np.bincount(batch.sequences, minlength=len(starts))
        for start, own in zip(starts, np.split(batch.targets, np.cumsum(counts)[:-1]), strict=True):
            end = own[-1] + 1 if len(own) else start + 1
            sequences.append(batch.tokens[start:end])
            targets.append(own - start)
    firsts = np.cumsum([len(own) for own in targets]) - [len(own) for own in targets]
    layout = forward_layout([len(sequence) for sequence in sequences], learner)
    result = []
    for bin_, pad in zip(layout.bins[0], layout.paddings, strict=True):
        chosen = [sequences[i].tolist() for i in bin_]
        packed = pack_sequences(chosen, [len(sequence) for sequence in chosen], pad)
        starts = np.cumsum(packed.lengths) - packed.lengths
        none = [np.zeros(0, np.int64)]  # of a bin that is empty
        places = np.concatenate([*none, *(firsts[i] + np.arange(len(targets[i])) for i in bin_)])
        wanted = np.concatenate([*none, *(start + targets[i] for i, start in zip(bin_, starts, strict=False))])
        result.append(ForwardBatch(replace(packed, targets=wanted), places))
    return result
