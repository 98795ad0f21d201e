"""Packing against its lower bound and against padding: 200 batches of 256 log-normal lengths, 8 ranks, cap 16,384.

    python -m benchmarks.packing

Prints what is compared, writes benchmarks/results/packing.json, and exits with 1 when a target is missed: work between
ranks within 3 %, micro-batches within one of the lower bound on average, 100,000 sequences planned in under a second.
The same batches are laid out for ranks that share sequences and cut them evenly (CP 2, TP 2 with sequence parallelism).
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
"""Of Qwen3-4B: 201 million FLOPs of linear layers per token and layer over 8,192 of attention per pair of tokens."""
MANY = 100_000
SHARED = Learner(
    max_tokens_per_gpu=CAP // 2, context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True
)
"""The same cap: a micro-batch holds what two ranks take."""


def lengths(draw: random.Random, count: int) -> list[int]:
    return [max(1, min(LONGEST, int(draw.lognormvariate(7.2, 0.9)))) for _ in range(count)]


def main() -> int:
    draw = random.Random(0)
    batches = [lengths(draw, SAMPLES) for _ in range(BATCHES)]
    reports, shared, overfull, seeds_padding, seeds_count = [], [], 0, [], []
    for batch in batches:
        packed = pack(batch, CAP, RANKS, crossover=CROSSOVER)
        assert sorted(i for bins in packed for bin_ in bins for i in bin_) == list(range(SAMPLES))
        overfull += sum(sum(batch[i] for i in bin_) > CAP for bins in packed for bin_ in bins)
        reports.append(packing_report(packed, batch, CAP, crossover=CROSSOVER))
        shared.append(training_layout(batch, SHARED, RANKS, CROSSOVER).report)
        rows = dynamic_batches(batch, RANKS, max_tokens=CAP, round_to=ROUND)
        sizes = [len(bin_) * padded for bins in rows.bins for bin_, padded in zip(bins, rows.padded, strict=True)]
        seeds_padding.append(sum(sizes) / sum(batch))
        seeds_count.append(len(rows.padded))
    many = lengths(draw, MANY)
    began = time.process_time()
    pack(many, CAP, RANKS, crossover=CROSSOVER)
    seconds = time.process_time() - began
    found = {
        "flop_imbalance_mean": fmean(report.imbalance for report in reports),
        "flop_imbalance_worst": max(report.imbalance for report in reports),
        "micro_batches": fmean(report.micro_batches for report in reports),
        "lower_bound": fmean(report.lower_bound for report in reports),
        "above_the_bound_mean": fmean(report.micro_batches - report.lower_bound for report in reports),
        "above_the_bound_worst": max(report.micro_batches - report.lower_bound for report in reports),
        "micro_batches_above_the_cap": overfull,
        "padding": fmean(report.padding for report in reports),
        "padding_cp_2_tp_2": fmean(report.padding for report in shared),
        "above_the_bound_mean_cp_2_tp_2": fmean(report.micro_batches - report.lower_bound for report in shared),
        "padding_to_the_longest": fmean(LONGEST * SAMPLES / sum(batch) for batch in batches),
        "padding_of_dynamic_batching": fmean(seeds_padding),
        "micro_batches_of_dynamic_batching": fmean(seeds_count),
        "seconds_for_100_000": seconds,
    }
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<36}{value:10.4f}")
    record("packing", found)
    met = found["flop_imbalance_worst"] < 0.03 and found["above_the_bound_mean"] <= 1 and overfull == 0 and seconds < 1
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
