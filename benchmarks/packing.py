"""Compares packing with its lower bound, with padding, with dynamic batching and with ranks that get samples in turn.

    python -m benchmarks.packing

Packs 200 batches of 256 sequences with log-normal lengths for 8 ranks, with at most 16,384 tokens per micro-batch. The
same batches are also packed for ranks that split sequences evenly (CP 2, TP 2 with sequence parallelism), and with
samples that are assigned to the ranks in turn (`--no-balance-data`).

Prints the results and writes benchmarks/results/packing.json. Exits with 1 if a target is missed: the FLOPs of the
ranks differ by less than 3 %, there is at most one micro-batch above the lower bound on average, and planning 100,000
sequences takes less than a second.
"""

from __future__ import annotations

import random
import sys
import time
from statistics import fmean

from benchmarks.records import record
from miles_async.batching.dynamic_batching import dynamic_batches
from miles_async.batching.layout import training_layout
from miles_async.batching.packing import pack, packing_report
from miles_async.config.schema import Learner

BATCHES, SAMPLES, LONGEST, RANKS, CAP = 200, 256, 8192, 8, 16_384
ROUND = 128
CROSSOVER = 24_500.0
"""Length at which attention takes as many FLOPs as the linear layers, for Qwen3-4B: 201 million FLOPs of the linear
layers per token and layer, divided by 8,192 FLOPs of attention per pair of tokens."""
MANY = 100_000
SPLIT = Learner(
    max_tokens_per_gpu=CAP // 2, context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True
)
"""The same limit in all: with context parallelism, a micro-batch holds the tokens of two ranks."""


def lengths(draw: random.Random, count: int) -> list[int]:
    return [max(1, min(LONGEST, int(draw.lognormvariate(7.2, 0.9)))) for _ in range(count)]


def main() -> int:
    draw = random.Random(0)
    batches = [lengths(draw, SAMPLES) for _ in range(BATCHES)]
    reports, split, in_turn, overfull, dynamic_padding, dynamic_count = [], [], [], 0, [], []
    for batch in batches:
        packed = pack(batch, CAP, RANKS, crossover=CROSSOVER)
        assert sorted(i for bins in packed for bin_ in bins for i in bin_) == list(range(SAMPLES))
        overfull += sum(sum(batch[i] for i in bin_) > CAP for bins in packed for bin_ in bins)
        reports.append(packing_report(packed, batch, CAP, crossover=CROSSOVER))
        dealt = pack(batch, CAP, RANKS, crossover=CROSSOVER, balance=False)
        in_turn.append(packing_report(dealt, batch, CAP, crossover=CROSSOVER))
        split.append(training_layout(batch, SPLIT, RANKS, CROSSOVER).report)
        rows = dynamic_batches(batch, RANKS, max_tokens=CAP, round_to=ROUND)
        sizes = [len(bin_) * padded for bins in rows.bins for bin_, padded in zip(bins, rows.padded, strict=True)]
        dynamic_padding.append(sum(sizes) / sum(batch))
        dynamic_count.append(len(rows.padded))
    many = lengths(draw, MANY)
    began = time.process_time()
    pack(many, CAP, RANKS, crossover=CROSSOVER)
    seconds = time.process_time() - began
    found = {
        "flop_imbalance_mean": fmean(report.imbalance for report in reports),
        "flop_imbalance_worst": max(report.imbalance for report in reports),
        "flop_imbalance_in_turn_mean": fmean(report.imbalance for report in in_turn),
        "micro_batches": fmean(report.micro_batches for report in reports),
        "lower_bound": fmean(report.lower_bound for report in reports),
        "above_the_bound_mean": fmean(report.micro_batches - report.lower_bound for report in reports),
        "above_the_bound_worst": max(report.micro_batches - report.lower_bound for report in reports),
        "micro_batches_above_the_cap": overfull,
        "padding": fmean(report.padding for report in reports),
        "padding_cp_2_tp_2": fmean(report.padding for report in split),
        "above_the_bound_mean_cp_2_tp_2": fmean(report.micro_batches - report.lower_bound for report in split),
        "padding_to_the_longest": fmean(LONGEST * SAMPLES / sum(batch) for batch in batches),
        "padding_of_dynamic_batching": fmean(dynamic_padding),
        "micro_batches_of_dynamic_batching": fmean(dynamic_count),
        "seconds_for_100_000": seconds,
    }
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<36}{value:10.4f}")
    record("packing", found)
    met = found["flop_imbalance_worst"] < 0.03 and found["above_the_bound_mean"] <= 1 and overfull == 0 and seconds < 1
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
