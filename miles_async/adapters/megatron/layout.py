"""Which sequences share a micro-batch: packed end to end, or in padded rows where dynamic batching is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_async.config.schema import Learner, Model
from miles_async.core.dynamic_batching import dynamic_batches
from miles_async.core.packing import Bin, PackingReport, fixed_size, pack, report_on


@dataclass(frozen=True, slots=True)
class Layout:
    bins: list[list[Bin]]
    """`bins[rank][micro_batch]`, equally many on all ranks."""
    padded: list[int | None]
    """By micro-batch: what its sequences are padded to; None where they lie end to end."""
    report: PackingReport


def training_layout(lengths: Sequence[int], learner: Learner, ranks: int, knee: float = math.inf) -> Layout:
    """Raises ValueError when a sequence does not fit (see `pack` and `dynamic_batches`)."""
    if learner.use_dynamic_batching_in_train:
        limit, round_to = learner.max_tokens_per_microbatch_in_train, learner.sequence_length_round_in_train
        return _rows(lengths, ranks, limit or learner.max_tokens_per_gpu, round_to, knee)
    if learner.use_dynamic_batch_size:
        bins = pack(lengths, learner.max_tokens_per_gpu, ranks, knee=knee, balance=learner.balance_data)
    else:
        bins = fixed_size(len(lengths), learner.micro_batch_size, ranks)
    report = report_on(bins, lengths, learner.max_tokens_per_gpu, knee=knee)
    return Layout(bins, [None] * len(bins[0]), report)


def forward_layout(lengths: Sequence[int], learner: Learner) -> Layout:
    """For work without gradients, on one rank."""
    if learner.use_dynamic_batching_in_infer:
        limit, round_to = learner.max_tokens_per_microbatch_in_infer, learner.sequence_length_round_in_infer
        return _rows(lengths, 1, limit or learner.max_tokens_per_gpu, round_to, math.inf)
    packing = learner.model_copy(update={"use_dynamic_batching_in_train": False, "use_dynamic_batch_size": True})
    return training_layout(lengths, packing, 1)


def _rows(lengths: Sequence[int], ranks: int, limit: int, round_to: int, knee: float) -> Layout:
    plan = dynamic_batches(lengths, ranks, max_tokens=limit, round_to=round_to)
    computed = sum(len(bin_) * width for bins in plan.bins for bin_, width in zip(bins, plan.padded, strict=True))
    report = report_on(plan.bins, lengths, limit, knee=knee, computed=computed)
    return Layout(plan.bins, list(plan.padded), report)


def attention_knee(model: Model) -> float:
    """The length in tokens at which causal attention costs a layer as much as its linear parts, by their FLOPs.

    Per token and layer, forward: twice the weights of projections and (active) feed-forward parts, and the output head
    shared among the layers; attention: twice the heads' width per pair of tokens.
    """
    if model.hf_checkpoint is None:
        tiny = model.tiny_model
        shape: dict[str, Any] = {
            "hidden_size": tiny.hidden_size,
            "intermediate_size": tiny.ffn_hidden_size,
            "num_hidden_layers": tiny.num_layers,
            "num_attention_heads": tiny.num_attention_heads,
            "num_key_value_heads": tiny.num_query_groups,
        }
    else:
        shape = json.loads((Path(model.hf_checkpoint).expanduser() / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head = shape.get("head_dim") or hidden // heads
    width = heads * head
    projections = hidden * (2 * width + 2 * shape.get("num_key_value_heads", heads) * head)
    experts = shape.get("num_experts_per_tok")
    feed_forward = shape["moe_intermediate_size"] * experts if experts else shape["intermediate_size"]
    output = hidden * shape.get("vocab_size", 0) / shape["num_hidden_layers"]
    return float(2 * (projections + 3 * hidden * feed_forward + output) / (2 * width))
