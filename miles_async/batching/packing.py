"""Which samples share a micro-batch, and which rank trains them.

Nothing is padded: sequences lie end to end. Three things are wanted of a plan: no micro-batch above the token cap,
equally many micro-batches on every rank (ranks step through them together), and equally much work, which is not the
same as equally many tokens: attention grows with the square of a sequence's length.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

Bin = list[int]
"""Indices of the samples that are packed into one micro-batch."""


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    ranks: int = 1,
    *,
    multiple: int = 1,
    crossover: float = math.inf,
    balance: bool = True,
) -> list[list[Bin]]:
    """Micro-batches of at most `max_tokens` tokens for each data-parallel rank: `result[rank][micro_batch]`.

    Samples go to the ranks by their work, longest first, each to the rank that has the least (Graham 1969: at most 4/3
    of the best, and far closer with many samples); within a rank they are packed best-fit decreasing (Johnson 1974:
    never more than 11/9 of the fewest bins, plus one). Then the heaviest bins are halved until every rank has equally
    many, and a `multiple` (of the virtual-pipeline group). The bins of a rank come in shuffled order. Deterministic.

    Without `balance`, samples are dealt to the ranks in turn, whatever their work. `crossover` is the length in tokens at
    which attention costs as much as all linear layers; infinity counts tokens only.
    Of fewer samples than ranks, or of none, the ranks left over get empty bins.

    Raises ValueError when a sample alone exceeds the cap.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if longest_first and lengths[longest_first[0]] > max_tokens:
        worst = longest_first[0]
        raise ValueError(
            f"sample {worst} has {lengths[worst]} tokens, more than the micro-batch cap of {max_tokens}; raise "
            "max_tokens_per_gpu, or lower rollout_max_prompt_len or rollout_max_response_len"
        )
    if balance:
        shares = _balanced(longest_first, [sequence_cost(length, crossover) for length in lengths], ranks)
    else:
        shares = [[i for i in longest_first if i % ranks == rank] for rank in range(ranks)]
    packed = [_best_fit(share, lengths, max_tokens) for share in shares]
    count = max(1, *map(len, packed))
    count += -count % multiple
    for rank, bins in enumerate(packed):
        _split_up_to(count, bins, lengths)
        for bin_ in bins:
            bin_.sort()
        packed[rank] = _shuffled(bins)
    return packed


def pack_fixed_size(count: int, size: int, ranks: int, *, multiple: int = 1) -> list[list[Bin]]:
    """`size` samples per micro-batch, whatever their tokens, dealt to the ranks in turn; equally many on all ranks.

    Empty micro-batches make up the `multiple`.
    """
    shares = [list(range(rank, count, ranks)) for rank in range(ranks)]
    each = max(1, -(-count // (size * ranks)))
    each += -each % multiple
    return [[share[place * size : (place + 1) * size] for place in range(each)] for share in shares]


def sequence_cost(length: int, crossover: float) -> float:
    """What a sequence costs, in units of one token's pass through the linear layers."""
    return length + length * length / crossover


def _balanced(longest_first: Sequence[int], costs: Sequence[float], ranks: int) -> list[list[int]]:
    if ranks == 1:
        return [list(longest_first)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]
    for index in longest_first:
        load, rank = least[0]
        shares[rank].append(index)
        heapq.heapreplace(least, (load + costs[index], rank))
    return shares


def _best_fit(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Each sample into the fullest bin that still has room for it."""
    bins: list[Bin] = []
    open_: list[tuple[int, int]] = []  # (room, bin), rising
    for index in longest_first:
        place = bisect_left(open_, (lengths[index], 0))
        if place == len(open_):
            room, bin_ = max_tokens, len(bins)
            bins.append([])
        else:
            room, bin_ = open_.pop(place)
        bins[bin_].append(index)
        insort(open_, (room - lengths[index], bin_))
    return bins


def _split_up_to(count: int, bins: list[Bin], lengths: Sequence[int]) -> None:
    """Halve the bin with the most tokens, again and again; bins of one sample are whole, so empty ones follow."""
    divisible = [(-sum(lengths[i] for i in bin_), place) for place, bin_ in enumerate(bins) if len(bin_) > 1]
    heapq.heapify(divisible)
    while len(bins) < count:
        if not divisible:
            bins.append([])
            continue
        _, place = heapq.heappop(divisible)
        # Every second sample of a bin that is sorted by length: the halves weigh about the same.
        halves = bins[place][::2], bins[place][1::2]
        bins[place] = halves[0]
        bins.append(halves[1])
        for half, where in zip(halves, (place, len(bins) - 1), strict=True):
            if len(half) > 1:
                heapq.heappush(divisible, (-sum(lengths[i] for i in half), where))


def _shuffled(bins: Sequence[Bin]) -> list[Bin]:
    """Fisher-Yates with a small generator of its own (Park and Miller 1988): the same on every machine."""
    mixed, state = list(bins), 1
    for last in range(len(mixed) - 1, 0, -1):
        state = state * 48271 % 2147483647
        other = state % (last + 1)
        mixed[last], mixed[other] = mixed[other], mixed[last]
    return mixed


@dataclass(frozen=True, slots=True)
class PackingReport:
    """How far a plan is from the best one could hope for."""

    micro_batches: int
    """Of each rank."""
    lower_bound: int
    """Fewer per rank cannot hold the tokens, whatever the plan."""
    imbalance: float
    """The work of the rank that has the most, over the mean, minus 1."""
    padding: float
    """Tokens computed per token of a sample; 1 is none."""


def packing_report(
    packed: Sequence[Sequence[Bin]],
    lengths: Sequence[int],
    max_tokens: int,
    *,
    multiple: int = 1,
    crossover: float = math.inf,
    computed: int | None = None,
) -> PackingReport:
    """`computed` is the number of tokens computed where some of them are padding."""
    tokens = sum(lengths)
    fewest = max(1, -(-tokens // (max_tokens * len(packed))))
    loads = [sum(sequence_cost(lengths[i], crossover) for bin_ in bins for i in bin_) for bins in packed]
    return PackingReport(
        micro_batches=len(packed[0]),
        lower_bound=fewest + -fewest % multiple,
        imbalance=max(loads) * len(loads) / sum(loads) - 1 if tokens else 0.0,
        padding=1.0 if computed is None or not tokens else computed / tokens,
    )
