"""Decides which sequences share a micro-batch and how they are padded.

By default sequences are packed end to end (`batching/packing.py`). With dynamic batching they are the rows of padded
micro-batches (`batching/dynamic_batching.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_async.batching.dynamic_batching import dynamic_batches
from miles_async.batching.packing import Bin, PackingReport, pack, pack_fixed_size, packing_report
from miles_async.config.schema import Learner


@dataclass(frozen=True, slots=True)
class Padding:
    """Length to which the sequences of a micro-batch are padded."""

    width: int | None = None
    """Length of every sequence; None if sequences are packed end to end."""
    unit: int = 1
    """Packed sequences are padded to a multiple of this. Context parallelism needs more than 1."""

    def padded_length(self, tokens: int) -> int:
        """Length of a sequence of `tokens` tokens after padding."""
        return tokens + -tokens % self.unit if self.width is None else self.width


@dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of sequences to micro-batches."""

    bins: list[list[Bin]]
    """`bins[rank][micro_batch]`, equally many on all ranks."""
    paddings: list[Padding]
    """By micro-batch."""
    report: PackingReport


def training_layout(
    lengths: Sequence[int],
    learner: Learner,
    ranks: int,
    crossover: float = math.inf,
    squares: Sequence[int] | None = None,
) -> Layout:
    """Lay out one optimizer step for `ranks` data-parallel ranks; `lengths` are tokens per sequence.

    `crossover` is the sequence length at which attention costs as much as the linear layers. `squares` is as in `pack`.
    Raises ValueError if a sequence does not fit into a micro-batch.
    """
    if learner.use_dynamic_batching_in_train:
        limit, round_to = learner.max_tokens_per_microbatch_in_train, learner.sequence_length_round_in_train
        return _row_layout(lengths, learner, ranks, limit, round_to, crossover)
    fixed_size = not learner.use_dynamic_batch_size
    return _packed_layout(lengths, learner, ranks, crossover, fixed_size=fixed_size, squares=squares)


def forward_layout(lengths: Sequence[int], learner: Learner) -> Layout:
    """Lay out forward passes without gradients on one rank. Raises ValueError like `training_layout`."""
    if learner.use_dynamic_batching_in_infer:
        limit, round_to = learner.max_tokens_per_microbatch_in_infer, learner.sequence_length_round_in_infer
        return _row_layout(lengths, learner, 1, limit, round_to, math.inf)
    return _packed_layout(lengths, learner, 1, math.inf, fixed_size=False)


def longest_sequence(learner: Learner) -> int:
    """The most tokens of a sequence that fits into the micro-batches of training and of forward passes."""
    return min(
        _longest_row(learner, learner.max_tokens_per_microbatch_in_train, learner.sequence_length_round_in_train)
        if learner.use_dynamic_batching_in_train
        else learner.micro_batch_tokens,
        _longest_row(learner, learner.max_tokens_per_microbatch_in_infer, learner.sequence_length_round_in_infer)
        if learner.use_dynamic_batching_in_infer
        else learner.micro_batch_tokens,
    )


def _longest_row(learner: Learner, limit: int | None, round_to: int) -> int:
    limit = limit or learner.micro_batch_tokens
    return limit - limit % math.lcm(round_to, learner.sequence_unit)


def _packed_layout(
    lengths: Sequence[int],
    learner: Learner,
    ranks: int,
    crossover: float,
    *,
    fixed_size: bool,
    squares: Sequence[int] | None = None,
) -> Layout:
    padding, cap = Padding(unit=learner.sequence_unit), learner.micro_batch_tokens
    # Megatron's interleaved schedule takes micro-batches in groups of as many as the pipeline has ranks.
    virtual_stages = learner.virtual_pipeline_model_parallel_size is not None
    multiple = learner.pipeline_model_parallel_size if virtual_stages else 1
    if fixed_size:
        bins = pack_fixed_size(len(lengths), learner.micro_batch_size, ranks, multiple=multiple)
    else:
        padded = [padding.padded_length(length) for length in lengths]
        balance = learner.balance_data
        bins = pack(padded, cap, ranks, multiple=multiple, crossover=crossover, squares=squares, balance=balance)
    # Sequence parallelism needs a multiple of `pack_unit` tokens per micro-batch, which adds a little more padding.
    unit = learner.pack_unit
    computed = 0
    for bin_ in (bin_ for rank_bins in bins for bin_ in rank_bins if bin_):
        tokens = sum(padding.padded_length(lengths[i]) for i in bin_)
        computed += tokens + -tokens % unit
    report = packing_report(
        bins, lengths, cap, multiple=multiple, crossover=crossover, squares=squares, computed=computed
    )
    return Layout(bins, [padding] * len(bins[0]), report)


def _row_layout(
    lengths: Sequence[int], learner: Learner, ranks: int, limit: int | None, round_to: int, crossover: float
) -> Layout:
    limit = limit or learner.micro_batch_tokens
    # A row must satisfy both the setting and the divisibility that context parallelism asks for.
    round_to = math.lcm(round_to, learner.sequence_unit)
    stages = learner.pipeline_model_parallel_size
    plan = dynamic_batches(lengths, ranks, max_tokens=limit, round_to=round_to, multiple=stages)
    computed = sum(len(bin_) * width for bins in plan.bins for bin_, width in zip(bins, plan.padded, strict=True))
    report = packing_report(plan.bins, lengths, limit, multiple=stages, crossover=crossover, computed=computed)
    return Layout(plan.bins, [Padding(width) for width in plan.padded], report)


def positions_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T] position of each token in its sequence, for sequences of these lengths that are laid end to end."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def context_parallel_indices(lengths: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """[ranks, T / ranks] indices of the packed tokens that each context-parallel rank computes, ascending.

    Every sequence is cut into `2 * ranks` equal chunks. Rank r takes chunk r from the front and chunk r from the back,
    so that causal attention costs all ranks the same: early tokens attend to few others and late tokens to many.
    Megatron's rotary embedding and Transformer Engine expect this order.

    `lengths` [n] must be divisible by `2 * ranks` unless there is only one rank.
    """
    total = int(lengths.sum())
    if ranks == 1:
        return np.arange(total)[None]
    chunk = positions_of(lengths) // np.repeat(lengths // (2 * ranks), lengths)
    owner = np.minimum(chunk, 2 * ranks - 1 - chunk)
    # A stable sort by owner lists the tokens of each rank in pack order; all ranks own equally many.
    return np.argsort(owner, kind="stable").reshape(ranks, -1)
