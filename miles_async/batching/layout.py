"""Which sequences share a micro-batch: packed end to end, or in padded rows where dynamic batching is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from miles_async.batching.dynamic_batching import dynamic_batches
from miles_async.batching.packing import Bin, PackingReport, pack, pack_fixed_size, packing_report
from miles_async.config.derived import micro_batch_tokens, pack_unit, sequence_unit
from miles_async.config.model_shape import shape_of
from miles_async.config.schema import Learner, Model


@dataclass(frozen=True, slots=True)
class Padding:
    """What makes the sequences of a micro-batch as long as they must be."""

    width: int | None = None
    """The length of every sequence; None where they lie end to end."""
    unit: int = 1
    """Where they do, each is as long as a multiple of this: more than 1 where ranks share sequences."""

    def length(self, tokens: int) -> int:
        return tokens + -tokens % self.unit if self.width is None else self.width


@dataclass(frozen=True, slots=True)
class Layout:
    bins: list[list[Bin]]
    """`bins[rank][micro_batch]`, equally many on all ranks."""
    paddings: list[Padding]
    """By micro-batch."""
    report: PackingReport


def training_layout(lengths: Sequence[int], learner: Learner, ranks: int, crossover: float = math.inf) -> Layout:
    """Raises ValueError when a sequence does not fit (see `pack` and `dynamic_batches`)."""
    if learner.use_dynamic_batching_in_train:
        limit, round_to = learner.max_tokens_per_microbatch_in_train, learner.sequence_length_round_in_train
        return _rows(lengths, learner, ranks, limit, round_to, crossover)
    return _packs(lengths, learner, ranks, crossover, fixed=not learner.use_dynamic_batch_size)


def forward_layout(lengths: Sequence[int], learner: Learner) -> Layout:
    """For work without gradients, on one rank."""
    if learner.use_dynamic_batching_in_infer:
        limit, round_to = learner.max_tokens_per_microbatch_in_infer, learner.sequence_length_round_in_infer
        return _rows(lengths, learner, 1, limit, round_to, math.inf)
    return _packs(lengths, learner, 1, math.inf, fixed=False)


def _packs(lengths: Sequence[int], learner: Learner, ranks: int, crossover: float, *, fixed: bool) -> Layout:
    padding, cap, multiple = Padding(unit=sequence_unit(learner)), micro_batch_tokens(learner), _multiple(learner)
    if fixed:
        bins = pack_fixed_size(len(lengths), learner.micro_batch_size, ranks, multiple=multiple)
    else:
        padded = [padding.length(length) for length in lengths]
        bins = pack(padded, cap, ranks, multiple=multiple, crossover=crossover, balance=learner.balance_data)
    whole = pack_unit(learner)
    computed = 0
    for bin_ in (bin_ for of_rank in bins for bin_ in of_rank if bin_):
        tokens = sum(padding.length(lengths[i]) for i in bin_)
        computed += tokens + -tokens % whole
    report = packing_report(bins, lengths, cap, multiple=multiple, crossover=crossover, computed=computed)
    return Layout(bins, [padding] * len(bins[0]), report)


def _rows(
    lengths: Sequence[int], learner: Learner, ranks: int, limit: int | None, round_to: int, crossover: float
) -> Layout:
    limit = limit or micro_batch_tokens(learner)
    round_to = math.lcm(round_to, sequence_unit(learner))
    stages = learner.pipeline_model_parallel_size
    plan = dynamic_batches(lengths, ranks, max_tokens=limit, round_to=round_to, multiple=stages)
    computed = sum(len(bin_) * width for bins in plan.bins for bin_, width in zip(bins, plan.padded, strict=True))
    report = packing_report(plan.bins, lengths, limit, multiple=stages, crossover=crossover, computed=computed)
    return Layout(plan.bins, [Padding(width) for width in plan.padded], report)


def _multiple(learner: Learner) -> int:
    """Virtual stages take the micro-batches in groups of as many as the pipeline has ranks."""
    return 1 if learner.virtual_pipeline_model_parallel_size is None else learner.pipeline_model_parallel_size


def attention_crossover(model: Model) -> float:
    """The length in tokens at which causal attention costs a layer as much as its linear parts, by their FLOPs.

    Per token and layer, forward: twice the weights of projections and (active) feed-forward parts, and the output head
    shared among the layers; attention: twice the heads' width per pair of tokens.
    """
    shape = shape_of(model)
    if shape is None:
        return math.inf
    width = shape.heads * shape.head_width
    projections = shape.hidden * (2 * width + 2 * shape.query_groups * shape.head_width)
    feed_forward = 3 * shape.hidden * shape.feed_forward * shape.active_experts
    output = shape.hidden * shape.vocabulary / shape.layers
    return 2 * (projections + feed_forward + output) / (2 * width)
