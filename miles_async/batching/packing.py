"""Sequence packing: assigns samples to data-parallel ranks and to micro-batches of each rank.

Sequences lie end to end without padding. A good plan has three properties:

- no micro-batch exceeds the token cap;
- all ranks have equally many micro-batches, because ranks step through them together;
- all ranks have equally much work. Equal tokens are not enough: attention grows with the square of a sequence's length.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

Bin = list[int]
"""Indices of the samples in one micro-batch."""


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    ranks: int = 1,
    *,
    multiple: int = 1,
    crossover: float = math.inf,
    squares: Sequence[int] | None = None,
    balance: bool = True,
) -> list[list[Bin]]:
    """Plan micro-batches of at most `max_tokens` tokens for each data-parallel rank: `result[rank][micro_batch]`.

    1. Samples are assigned to ranks by cost, longest first, each to the rank with the least work so far (Graham 1969:
       at most 4/3 of the optimum, and much closer with many samples).
    2. Each rank packs its samples best-fit decreasing (Johnson 1974: at most 11/9 of the fewest bins, plus one).
    3. The heaviest bins are halved until all ranks have equally many, and a multiple of `multiple`.

    The plan is deterministic, and the bins of a rank are in shuffled order. If there are fewer samples than ranks, the
    remaining ranks get empty bins.

    `crossover` is the length in tokens at which attention costs as much as all linear layers; infinity counts tokens
    only. `squares` replaces the squared lengths in the cost of attention, for entries that are units of samples with a
    common prefix (`batching/shared_prefixes.py`). Without `balance` samples are dealt to the ranks round-robin.

    Raises ValueError if a single sample exceeds `max_tokens`.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if longest_first and lengths[longest_first[0]] > max_tokens:
        longest = longest_first[0]
        raise ValueError(
            f"sample {longest} has {lengths[longest]} tokens, more than the micro-batch cap of {max_tokens}; raise "
            "max_tokens_per_gpu, or lower rollout_max_prompt_len or rollout_max_response_len"
        )
    if balance:
        costs = _costs(lengths, crossover, squares)
        rank_samples = _balance(longest_first, costs, ranks)
    else:
        rank_samples = [[i for i in longest_first if i % ranks == rank] for rank in range(ranks)]
    packed = [_best_fit(samples, lengths, max_tokens) for samples in rank_samples]
    count = max(1, *map(len, packed))
    count += -count % multiple
    for rank, bins in enumerate(packed):
        _split_until(count, bins, lengths)
        for bin_ in bins:
            bin_.sort()
        packed[rank] = _shuffle(bins)
    return packed


def pack_fixed_size(count: int, size: int, ranks: int, *, multiple: int = 1) -> list[list[Bin]]:
    """Plan micro-batches of `size` samples regardless of their lengths, dealt to the ranks round-robin.

    All ranks get equally many micro-batches, a multiple of `multiple`; missing ones are empty.
    """
    rank_samples = [list(range(rank, count, ranks)) for rank in range(ranks)]
    micro_batches = max(1, -(-count // (size * ranks)))
    micro_batches += -micro_batches % multiple
    return [[samples[i * size : (i + 1) * size] for i in range(micro_batches)] for samples in rank_samples]


def sequence_cost(length: int, crossover: float, square: int | None = None) -> float:
    """Cost of a sequence, in units of one token's pass through the linear layers.

    `square` is twice the number of its query-key pairs; by default its squared length.
    """
    return length + (length * length if square is None else square) / crossover


def _costs(lengths: Sequence[int], crossover: float, squares: Sequence[int] | None) -> list[float]:
    each = [None] * len(lengths) if squares is None else squares
    return [sequence_cost(length, crossover, square) for length, square in zip(lengths, each, strict=True)]


def _balance(longest_first: Sequence[int], costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Greedy scheduling (longest processing time first): samples of each rank, longest first."""
    if ranks == 1:
        return [list(longest_first)]
    rank_samples: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]  # a heap: the rank with the least work is first
    for index in longest_first:
        load, rank = loads[0]
        rank_samples[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    return rank_samples


def _best_fit(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Put each sample into the fullest bin that still has room for it."""
    bins: list[Bin] = []
    # (free tokens, bin), ascending. The first entry with enough room is the fullest bin that fits, which binary search
    # finds: 100,000 samples take less than a second.
    free: list[tuple[int, int]] = []
    for index in longest_first:
        best = bisect_left(free, (lengths[index], 0))
        if best == len(free):
            room, bin_ = max_tokens, len(bins)
            bins.append([])
        else:
            room, bin_ = free.pop(best)
        bins[bin_].append(index)
        insort(free, (room - lengths[index], bin_))
    return bins


def _split_until(count: int, bins: list[Bin], lengths: Sequence[int]) -> None:
    """Halve the bin with the most tokens until there are `count` bins; append empty bins if none can be halved."""
    divisible = [(-sum(lengths[i] for i in bin_), number) for number, bin_ in enumerate(bins) if len(bin_) > 1]
    heapq.heapify(divisible)
    while len(bins) < count:
        if not divisible:
            bins.append([])
            continue
        _, heaviest = heapq.heappop(divisible)
        # Best fit left the bin sorted by length. Taking every second sample gives halves of about the same weight.
        halves = bins[heaviest][::2], bins[heaviest][1::2]
        bins[heaviest] = halves[0]
        bins.append(halves[1])
        for half, number in zip(halves, (heaviest, len(bins) - 1), strict=True):
            if len(half) > 1:
                heapq.heappush(divisible, (-sum(lengths[i] for i in half), number))


def _shuffle(bins: Sequence[Bin]) -> list[Bin]:
    """Shuffle the bins, which best fit leaves in the order of their longest sample.

    Fisher-Yates with a Lehmer generator (Park and Miller 1988): unlike `random`, it needs no seed from the caller and
    gives the same order on every machine and Python version.
    """
    mixed, state = list(bins), 1
    for last in range(len(mixed) - 1, 0, -1):
        state = state * 48271 % 2147483647
        other = state % (last + 1)
        mixed[last], mixed[other] = mixed[other], mixed[last]
    return mixed


@dataclass(frozen=True, slots=True)
class PackingReport:
    """Distance of a plan from the ideal one."""

    micro_batches: int
    """Per rank."""
    lower_bound: int
    """Fewest micro-batches per rank that can hold all tokens, however the samples are packed."""
    imbalance: float
    """Work of the busiest rank divided by the mean, minus 1."""
    padding: float
    """Tokens computed per token of a sample; 1 means no padding."""


def packing_report(
    packed: Sequence[Sequence[Bin]],
    lengths: Sequence[int],
    max_tokens: int,
    *,
    multiple: int = 1,
    crossover: float = math.inf,
    squares: Sequence[int] | None = None,
    computed: int | None = None,
) -> PackingReport:
    """Rate a plan made by `pack` with the same arguments.

    `computed` is the number of tokens that the model computes, padding included; None means no padding.
    """
    tokens = sum(lengths)
    fewest = max(1, -(-tokens // (max_tokens * len(packed))))
    costs = _costs(lengths, crossover, squares)
    loads = [sum(costs[i] for bin_ in bins for i in bin_) for bins in packed]
    return PackingReport(
        micro_batches=len(packed[0]),
        lower_bound=fewest + -fewest % multiple,
        imbalance=max(loads) * len(loads) / sum(loads) - 1 if tokens else 0.0,
        padding=1.0 if computed is None or not tokens else computed / tokens,
    )
