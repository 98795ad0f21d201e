"""Which samples share a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

Bin = list[int]
"""Indices of the samples that are packed into one micro-batch."""


def pack(lengths: Sequence[int], max_tokens: int, ranks: int = 1) -> list[list[Bin]]:
    """Micro-batches of at most `max_tokens` tokens for each data-parallel rank, equally many on all ranks.

    First-fit decreasing (Johnson 1973: never more than 11/9 of the fewest bins, plus one), then bins are halved until
    their number divides by `ranks`, because ranks step through their micro-batches together. The heaviest bins are
    dealt first, each to the rank with the least tokens. Deterministic: ties go to the lower index.

    Raises ValueError when a sample alone exceeds the cap, or when there are fewer samples than ranks.
    """
    if len(lengths) < ranks:
        raise ValueError(
            f"{len(lengths)} samples cannot feed {ranks} ranks; raise global_batch_size to at least {ranks}"
        )
    bins = _first_fit_decreasing(lengths, max_tokens)
    while len(bins) % ranks:
        bins.append(_halve_largest(bins))
    return _deal(bins, [sum(lengths[i] for i in bin_) for bin_ in bins], ranks)


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    bins: list[Bin] = []
    room: list[int] = []
    first_open: dict[int, int] = {}  # by length: rooms only shrink, so bins before this one need no second look
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > max_tokens:
            raise ValueError(
                f"sample {index} has {length} tokens, more than the micro-batch cap of {max_tokens}; raise "
                "max_tokens_per_gpu, or lower rollout_max_prompt_len or rollout_max_response_len"
            )
        place = first_open.get(length, 0)
        while place < len(bins) and room[place] < length:
            place += 1
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(index)
        room[place] -= length
        first_open[length] = place
    return bins


def _halve_largest(bins: list[Bin]) -> Bin:
    """Take every second sample out of the bin with the most samples; the halves weigh about the same.

    Empty when no bin has two.
    """
    largest = max(range(len(bins)), key=lambda i: len(bins[i]))
    half, bins[largest] = bins[largest][1::2], bins[largest][::2]
    return half


def _deal(bins: list[Bin], loads: list[int], ranks: int) -> list[list[Bin]]:
    per_rank = len(bins) // ranks
    dealt: list[list[Bin]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(bins)), key=lambda i: (-loads[i], i)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < per_rank), key=lambda r: (tokens[r], r))
        dealt[rank].append(sorted(bins[i]))
        tokens[rank] += loads[i]
    return dealt
