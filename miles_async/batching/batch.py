"""Builds the batches that learner ranks train on: flat columns of tokens, ready for the model and cheap to send.

The driver builds them once from all groups of a drained batch, because advantages and packing need the whole batch
before it is divided among ranks. This package uses only NumPy, so that the driver does not load torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_async.batching.advantages import PostProcess, ScoredSample, score_samples, trained_positions, weight_samples
from miles_async.batching.flops import attention_crossover
from miles_async.batching.layout import Layout, Padding, forward_layout, training_layout
from miles_async.batching.packing import PackingReport
from miles_async.batching.shared_prefixes import Unit, common_prefixes, prefix_units
from miles_async.columns.column import COLUMNS, columns_of, value_of
from miles_async.config.losses import skips_zero_advantages
from miles_async.config.model_shape import balances_experts_by_bias, shape_of
from miles_async.config.schema import Learner, Model, RunConfig
from miles_async.errors import TrajectoryError, UserError
from miles_async.types import Group, Sample

UNITS_PER_RANK = 4
"""Fewest units of samples with a common prompt per data-parallel rank, so that the work can be balanced."""

_NO_PADDING = Padding()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: n sequences laid end to end, with T tokens in all. m of them are trained.

    A supervised batch has no `columns`. What is equal for several tokens is stored once, because batches travel to
    other machines; the entries of tokens are properties.
    """

    tokens: NDArray[np.int32]
    """[T] prompt and response ids of each sequence, followed by the padding of that sequence if it has any."""
    lengths: NDArray[np.int64]
    """[n] tokens of each sequence, padding included: a multiple of `sequence_unit`."""
    target_ranges: NDArray[np.int64]
    """[k, 2] ranges `[start, end)` of indices in `tokens` that contain the trained tokens, ascending."""
    sequence_advantages: NDArray[np.float32]
    """[n] advantage of each sequence, or the reward from which the learner computes it (`ScoredSample`); 0 in a
    supervised batch."""
    sequence_rewards: NDArray[np.float32]
    """[n] reward of each sequence, with the penalty on its length; 0 in a supervised batch."""
    sequence_weights: NDArray[np.float32]
    """[n] factor of each sequence's tokens in the loss's sum over tokens; 0 in a supervised batch. All ones give the
    mean over the step's tokens."""
    sequence_groups: NDArray[np.int64]
    """[n] number of each sequence's group in the drained batch; 0 in a supervised batch."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The entries of the m trained tokens in each column of the samples that the learner gets (`Column.packed`):
    `rollout_log_probs`, `spans`, `sampling_mask` if the samples have one, and those of plug-ins."""
    padding: int = 0
    """Number of padding tokens among the T tokens."""
    shared: NDArray[np.int64] | None = None
    """[n] number of leading tokens that each sequence has in common with the sequence before it. The model computes
    them once. None if it computes every sequence as a whole."""

    @property
    def computed_tokens(self) -> int:
        """Number of tokens that the model computes."""
        return len(self.tokens) - (0 if self.shared is None else int(self.shared.sum()))

    @property
    def of_plugins(self) -> Mapping[str, NDArray[Any]]:
        """The columns that plug-ins declare."""
        return {name: entries for name, entries in self.columns.items() if name not in COLUMNS.shipped}

    @property
    def trained_tokens(self) -> int:
        """m: number of trained tokens."""
        return int(np.diff(self.target_ranges).sum())

    @property
    def targets(self) -> NDArray[np.int64]:
        """[m] indices in `tokens` of the trained tokens. The model predicts each one at the index before it."""
        starts, counts = self.target_ranges[:, 0], np.diff(self.target_ranges)[:, 0]
        offsets: NDArray[np.int64] = np.repeat(starts - np.cumsum(counts) + counts, counts)
        return offsets + np.arange(len(offsets))

    @property
    def sequences(self) -> NDArray[np.int64]:
        """[m] number of the sequence that each trained token belongs to, ascending."""
        owners = np.searchsorted(np.cumsum(self.lengths), self.target_ranges[:, 0], side="right")
        return np.repeat(owners, np.diff(self.target_ranges)[:, 0])

    @property
    def advantages(self) -> NDArray[np.float32]:
        """[m] advantage of each trained token's sequence."""
        return self.sequence_advantages[self.sequences]

    @property
    def rewards(self) -> NDArray[np.float32]:
        """[m] reward of each trained token's sequence."""
        return self.sequence_rewards[self.sequences]

    @property
    def loss_weights(self) -> NDArray[np.float32]:
        """[m] factor of each trained token in the loss's sum over tokens."""
        return self.sequence_weights[self.sequences]


def ranges_of(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """[k, 2] the ranges `[start, end)` that together contain the ascending `indices` [m]."""
    breaks = np.flatnonzero(np.diff(indices) != 1)
    ends = np.append(breaks, len(indices) - 1)[: len(indices)]
    starts = np.concatenate([[0], breaks + 1])[: len(indices)].astype(np.int64)
    return np.stack([indices[starts], indices[ends] + 1], axis=1)


@dataclass(frozen=True, slots=True)
class TrainStep:
    """The part of one optimizer step that one rank computes."""

    micro_batches: list[PackedBatch]
    """Equally many on all ranks."""
    total_tokens: int
    """Trained tokens of the step over all ranks, by which the loss is divided; at least 1. Skipped tokens count."""
    packing: PackingReport | None = None
    """Quality of the step's packing; None for supervised steps."""
    skipped_tokens: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens of the step over all ranks that are in no micro-batch, because their samples have no gradient:
    their number by the weight version that sampled them."""
    trajectories: int = 1
    """Trajectories of the step over all ranks; skipped ones count."""


def rank_batches(
    groups: Sequence[Group],
    config: RunConfig,
    world_size: int,
    *,
    share_prefixes: bool = False,
    post_process: PostProcess | None = None,
) -> list[list[TrainStep]]:
    """Divide a drained batch among the learner's ranks: `result[rank][step]`.

    Ranks of one model replica (tensor, context and pipeline parallelism) get the same batches. `share_prefixes` states
    whether the ranks compute a common prefix of samples once. `post_process` is that of `score_samples`.

    Raises TrajectoryError like `policy_steps`, and UserError if the configuration cannot divide this batch.
    """
    learner = config.learner
    try:
        ranks = learner.data_parallel_ranks(world_size)
        replica_batches = policy_steps(
            groups, config, ranks=ranks, share_prefixes=share_prefixes, post_process=post_process
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return [replica_batches[learner.data_parallel_rank(rank, world_size)] for rank in range(world_size)]


def policy_steps(
    groups: Sequence[Group],
    config: RunConfig,
    *,
    ranks: int,
    share_prefixes: bool = False,
    computes_all: bool = False,
    post_process: PostProcess | None = None,
) -> list[list[TrainStep]]:
    """Build the optimizer steps of a training batch for `ranks` data-parallel ranks: `result[rank][step]`.

    Samples without a gradient are in no micro-batch, but count in the mean over tokens or samples. With `computes_all`
    the micro-batches contain all samples; the gradient is the same. With `share_prefixes` samples with a common prefix
    are adjacent, and their common prefixes are marked, as far as the layout allows it. The segments of a trajectory are
    in the same step, unless `segments_are_samples`.

    Raises TrajectoryError if a sample has no numeric reward, inconsistent columns or no sampling mask although another
    one has a mask, and ValueError if a sample with a gradient does not fit into a micro-batch or there are fewer
    trajectories than steps.
    """
    max_response_len = config.rollout.rollout_max_response_len
    scored = score_samples(groups, config.algorithm, max_response_len, post_process)
    _check_masks(scored)
    columns = trained_columns(one.sample for one in scored)
    steps = config.steps_per_pass
    if config.learner.segments_are_samples:
        scored = [replace(one, trajectory=number) for number, one in enumerate(scored)]
        steps = ceil(len(scored) / config.samples_per_step)
    trajectories = [list(segments) for _, segments in groupby(scored, key=lambda one: one.trajectory)]
    if len(trajectories) < steps:
        raise ValueError(f"{len(trajectories)} samples are fewer than num_steps_per_rollout={steps}")
    # Groups may arrive in the order in which they finished, short ones first. In the order of their index the lengths
    # are mixed, so no step trains on one class of lengths.
    trajectories.sort(key=lambda segments: -1 if (index := segments[0].sample.index) is None else index)
    # Steps differ by at most one trajectory: groups may have been trained without samples that failed.
    bounds = [len(trajectories) * step // steps for step in range(steps + 1)]
    crossover = _crossover(config.model) if ranks > 1 else float("inf")
    skips = not computes_all and skips_zero_advantages(config) and not balances_experts_by_bias(config.model)
    shares = share_prefixes and config.learner.shares_prefixes
    packed_steps = []
    for start, end in pairwise(bounds):
        # The weights depend on the trajectories and tokens of the whole step, so they come before the split.
        step_samples = list(chain.from_iterable(trajectories[start:end]))
        weighted = weight_samples(step_samples, config.algorithm, max_response_len)
        computed = [one for one in weighted if not skips or _has_gradient(one)]
        skipped = [one.sample for one in weighted if skips and not _has_gradient(one)]
        packed = _pack_step(computed, skipped, columns, config.learner, ranks, crossover, share_prefixes=shares)
        packed_steps.append([replace(one, trajectories=end - start) for one in packed])
    return [[step[rank] for step in packed_steps] for rank in range(ranks)]


def _check_masks(scored: Sequence[ScoredSample]) -> None:
    """Raise TrajectoryError if some trained samples have a sampling mask and others have none."""
    trained = [one.sample for one in scored if len(trained_positions(one.sample))]
    unmasked = [sample for sample in trained if sample.sampling_mask is None]
    if 0 < len(unmasked) < len(trained):
        raise TrajectoryError(
            f"sample {unmasked[0].index} has no sampling mask, but other samples of the batch have one; generate all "
            "samples of a batch with the same rollout_top_p and rollout_top_k"
        )


def _crossover(model: Model) -> float:
    shape = shape_of(model)
    return float("inf") if shape is None else attention_crossover(shape)


def _pack_step(
    scored: Sequence[ScoredSample],
    skipped: Sequence[Sample],
    columns: Sequence[str],
    learner: Learner,
    ranks: int,
    crossover: float,
    *,
    share_prefixes: bool,
) -> list[TrainStep]:
    """Pack the samples of one optimizer step: `result[rank]`. `skipped` are those that take no pass but are counted."""
    if share_prefixes:
        # Samples with a common prefix are packed as one unit, so that they reach the same micro-batch.
        at_most = max(1, len(scored) // (UNITS_PER_RANK * ranks)) if ranks > 1 else len(scored)
        samples, groups = [one.sample for one in scored], [one.group for one in scored]
        units = prefix_units(samples, groups, cap=learner.micro_batch_tokens, at_most=at_most)
    else:
        units = [Unit([i], tokens := len(one.sample.tokens), tokens**2) for i, one in enumerate(scored)]
    sizes, squares = [unit.tokens for unit in units], [unit.square for unit in units]
    layout = training_layout(sizes, learner, ranks, crossover, squares)
    packed = [
        [
            pack_samples([scored[i] for unit in bin_ for i in units[unit].members], columns, padding, share_prefixes)
            for bin_, padding in zip(bins, layout.paddings, strict=True)
        ]
        for bins in layout.bins
    ]
    skipped_tokens = _tokens_by_version(skipped)
    total_tokens = sum(batch.trained_tokens for batches in packed for batch in batches) + skipped_tokens.total()
    return [TrainStep(batches, max(total_tokens, 1), layout.report, skipped_tokens) for batches in packed]


def _has_gradient(one: ScoredSample) -> bool:
    """Whether a loss in which every term is a multiple of the advantage has a gradient at the sample's tokens."""
    return one.advantage != 0 and len(trained_positions(one.sample)) > 0


def _tokens_by_version(samples: Sequence[Sample]) -> Counter[int]:
    """Number of trained tokens by the weight version that sampled them."""
    counts: Counter[int] = Counter()
    for sample in samples:
        sampled_by = COLUMNS.find("spans").packed(sample, sample.spans, trained_positions(sample))
        for version, number in zip(sampled_by.versions.tolist(), sampled_by.counts.tolist(), strict=True):
            counts[version] += number
    return counts


def trained_columns(samples: Iterable[Sample]) -> list[str]:
    """The names of the columns that the learner gets: at least one sample has a value of each."""
    names: dict[str, None] = {}
    for sample in samples:
        names |= {name: None for name, column, value in columns_of(sample) if column.trained and value is not None}
    return list(names)


def pack_samples(
    scored: Sequence[ScoredSample],
    columns: Sequence[str],
    padding: Padding = _NO_PADDING,
    share_prefixes: bool = False,
) -> PackedBatch:
    """Pack samples, with these columns, into one micro-batch. Without samples it is the minimal batch of
    `pack_sequences`.

    With `share_prefixes` the model computes the common prefix of adjacent samples once.
    """
    if not scored:
        return replace(
            pack_sequences([], [], padding), columns={name: COLUMNS.find(name).joined([]) for name in columns}
        )
    sequences = [np.asarray(one.sample.tokens) for one in scored]
    tokens, lengths, padding_tokens = _concatenate(sequences, padding)
    starts = np.cumsum(lengths) - lengths
    positions = [trained_positions(one.sample) for one in scored]
    firsts = [start + one.sample.prompt_length for one, start in zip(scored, starts.tolist(), strict=True)]
    ranges = [ranges_of(trained) + first for first, trained in zip(firsts, positions, strict=True)]
    return PackedBatch(
        tokens=tokens,
        lengths=lengths,
        target_ranges=np.concatenate(ranges),
        sequence_advantages=np.array([one.advantage for one in scored], np.float32),
        sequence_rewards=np.array([one.reward for one in scored], np.float32),
        sequence_weights=np.array([one.loss_weight for one in scored], np.float32),
        sequence_groups=np.array([one.group for one in scored], np.int64),
        columns={name: _packed_column(name, scored, positions) for name in columns},
        padding=padding_tokens,
        shared=common_prefixes(sequences) if share_prefixes else None,
    )


def _packed_column(name: str, scored: Sequence[ScoredSample], positions: Sequence[NDArray[np.int64]]) -> Any:
    """The entries of the trained tokens of all samples."""
    column = COLUMNS.find(name)
    return column.joined(
        [
            column.packed(one.sample, value_of(one.sample, name), trained)
            for one, trained in zip(scored, positions, strict=True)
        ]
    )


def _concatenate(
    sequences: Sequence[Sequence[int] | NDArray[Any]], padding: Padding
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Lay padded sequences end to end; returns tokens [T], lengths [n] and the number of padding tokens.

    Padding comes after each sequence, where causal attention makes it invisible to the sequence's own tokens.
    """
    lengths = np.array([padding.padded_length(len(sequence)) for sequence in sequences], np.int64)
    tokens = np.zeros(int(lengths.sum()), np.int32)
    for sequence, start in zip(sequences, (np.cumsum(lengths) - lengths).tolist(), strict=True):
        tokens[start : start + len(sequence)] = sequence
    return tokens, lengths, len(tokens) - sum(map(len, sequences))


def supervised_step(prompts: Sequence[list[int]], responses: Sequence[list[int]], learner: Learner) -> TrainStep:
    """Build one supervised step for one rank; every response token is trained.

    Raises ValueError if an example does not fit into a micro-batch.
    """
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    layout = training_layout([len(sequence) for sequence in sequences], learner, 1)
    return TrainStep(pack_layout(layout, sequences, list(map(len, prompts))), sum(map(len, responses)))


def pack_layout(layout: Layout, sequences: Sequence[Sequence[int]], first_targets: Sequence[int]) -> list[PackedBatch]:
    """Pack the sequences of a layout on one rank into its micro-batches; see `pack_sequences`."""
    return [
        pack_sequences([sequences[i] for i in bin_], [first_targets[i] for i in bin_], padding)
        for bin_, padding in zip(layout.bins[0], layout.paddings, strict=True)
    ]


def pack_sequences(
    sequences: Sequence[Sequence[int]], first_targets: Sequence[int], padding: Padding = _NO_PADDING
) -> PackedBatch:
    """Pack sequences into one micro-batch without columns.

    The tokens of sequence i from position `first_targets[i]` on are targets. Without sequences the batch has one token
    and no target, so that a rank without samples takes part in the collective operations of the step.
    """
    if not sequences:
        sequences, first_targets = [[0]], [1]
    tokens, lengths, padding_tokens = _concatenate(sequences, padding)
    starts = np.cumsum(lengths) - lengths
    # Lengths without padding, which is never a target.
    ranges = zip(starts.tolist(), first_targets, map(len, sequences), strict=True)
    targets = [(start + first, start + length) for start, first, length in ranges if first < length]
    return PackedBatch(
        tokens=tokens,
        lengths=lengths,
        target_ranges=np.array(targets, np.int64).reshape(-1, 2),
        sequence_advantages=np.zeros(len(lengths), np.float32),
        sequence_rewards=np.zeros(len(lengths), np.float32),
        sequence_weights=np.zeros(len(lengths), np.float32),
        sequence_groups=np.zeros(len(lengths), np.int64),
        padding=padding_tokens,
    )


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A micro-batch for forward passes without gradients, with sequences from one or more training micro-batches."""

    batch: PackedBatch
    target_indices: NDArray[np.int64]
    """[m] index of each target among the targets of all training micro-batches, concatenated."""


def repack_for_forward(batches: Sequence[PackedBatch], learner: Learner) -> list[ForwardBatch]:
    """Lay the sequences of training micro-batches out again for forward passes without gradients.

    Such passes keep no activations, so their micro-batches may hold more tokens, and other row lengths.
    """
    # Take the training micro-batches apart into sequences. A sequence ends at its last target: the padding and the
    # tokens after that predict nothing.
    masks = [batch.columns["sampling_mask"] for batch in batches if "sampling_mask" in batch.columns]
    mask = COLUMNS.find("sampling_mask").joined(masks) if masks else None
    sequences: list[NDArray[np.int32]] = []
    targets: list[NDArray[np.int64]] = []  # positions within each sequence
    for batch in batches:
        starts = np.cumsum(batch.lengths) - batch.lengths
        counts = np.bincount(batch.sequences, minlength=len(starts))
        for start, indices in zip(starts, np.split(batch.targets, np.cumsum(counts)[:-1]), strict=True):
            end = indices[-1] + 1 if len(indices) else start + 1
            sequences.append(batch.tokens[start:end])
            targets.append(indices - start)
    counts = np.array([len(positions) for positions in targets], np.int64)
    first_indices = np.cumsum(counts) - counts  # of each sequence's targets among all targets
    layout = forward_layout([len(sequence) for sequence in sequences], learner)
    result = []
    for bin_, padding in zip(layout.bins[0], layout.paddings, strict=True):
        chosen = [sequences[i].tolist() for i in bin_]
        # Packed without targets first: a mask may leave gaps that `pack_sequences` cannot express.
        packed = pack_sequences(chosen, [len(sequence) for sequence in chosen], padding)
        starts = np.cumsum(packed.lengths) - packed.lengths
        empty = np.zeros(0, np.int64)  # np.concatenate needs at least one array, and a bin may be empty
        target_indices = np.concatenate([empty, *(first_indices[i] + np.arange(counts[i]) for i in bin_)])
        moved = np.concatenate([empty, *(start + targets[i] for i, start in zip(bin_, starts, strict=False))])
        # Forward passes without gradients read no other column.
        columns = {} if mask is None else {"sampling_mask": mask.take(target_indices)}
        result.append(ForwardBatch(replace(packed, target_ranges=ranges_of(moved), columns=columns), target_indices))
    return result
