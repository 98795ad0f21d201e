"""Dynamic batching as ROLL describes it (seed `dynamic-batching`): sort, shard, and pad within each micro-batch.

Packing (`batching/packing.py`) is the default and pads nothing; this is for models or kernels that need rows of one
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Bin = list[int]
"""Indices of the samples that are the rows of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch position: every rank has one, with the same padded length."""

    start: int
    """Rows `[start, end)` of every rank's shard."""
    end: int
    padded: int
    """Tokens of each row."""

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        return self.count * self.padded


@dataclass(frozen=True, slots=True)
class DynamicBatches:
    bins: list[list[Bin]]
    """`bins[rank][micro_batch]`; empty where a rank has nothing to do while the others work."""
    padded: list[int]
    """Tokens of each row, by micro-batch; the same on all ranks."""


def dynamic_batches(
    lengths: Sequence[int], ranks: int, *, max_tokens: int, round_to: int, multiple: int = 1
) -> DynamicBatches:
    """Shards of sorted samples, cut at the same places on all ranks.

    The seed's example, lengths 7,6,8,5,1,3,8,6 on two ranks rounded to 2, is drawn with three micro-batches of 2x6,
    1x8 and 1x8 tokens, 56 on both ranks together; 2x6 needs `max_tokens` of 12 to 15. At the 10 it states, the rule it
    states gives four micro-batches (4, 6, 8, 8) of 52 tokens in all.

    Raises ValueError when a sample, rounded up, exceeds `max_tokens`.
    """
    shards = sort_and_shard(lengths, ranks)
    longest = [max(0 if i is None else lengths[i] for i in row) for row in zip(*shards, strict=True)]
    plan = split_to_multiple(partition(longest, max_tokens=max_tokens, round_to=round_to), multiple, round_to)
    bins = [[[i for i in shard[rows.start : rows.end] if i is not None] for rows in plan] for shard in shards]
    return DynamicBatches(bins, [rows.padded for rows in plan])


def sort_and_shard(lengths: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Each rank's samples, by rising length: rank r takes every `ranks`-th of the sorted samples, from the r-th on.

    Where the ranks do not divide the samples, the first ranks start with None: no sample.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    order = [*[None] * (-len(lengths) % ranks), *by_length]
    return [order[rank::ranks] for rank in range(ranks)]


def partition(longest: Sequence[int], *, max_tokens: int, round_to: int) -> list[Rows]:
    """Micro-batches of as many rows as `max_tokens` allows; `longest[i]` is the longest i-th row of any rank."""
    plan: list[Rows] = []
    for place, length in enumerate(longest):
        padded = length + -length % round_to
        if padded > max_tokens:
            raise ValueError(
                f"a sample of {length} tokens, rounded up to {padded}, exceeds the micro-batch limit of {max_tokens}; "
                "raise max_tokens_per_microbatch_in_train and _in_infer, or lower rollout_max_response_len"
            )
        if plan and (plan[-1].count + 1) * padded <= max_tokens:
            plan[-1] = Rows(plan[-1].start, place + 1, padded)
        else:
            plan.append(Rows(place, place + 1, padded))
    return plan


def split_to_multiple(plan: Sequence[Rows], multiple: int, round_to: int = 1) -> list[Rows]:
    """Halve the micro-batch with the most tokens, as often as needed; halves keep the padded length of their parent.

    Where all have one row and their number is still no multiple, empty ones make it up.
    """
    rows = list(plan) or [Rows(0, 0, round_to)]
    while len(rows) % multiple:
        place = max(range(len(rows)), key=lambda i: (rows[i].count > 1, rows[i].tokens, -i))
        parent = rows[place]
        if parent.count <= 1:
            end = rows[-1].end
            rows += [Rows(end, end, round_to)] * (-len(rows) % multiple)
            break
        middle = (parent.start + parent.end + 1) // 2
        rows[place : place + 1] = [
            Rows(parent.start, middle, parent.padded),
            Rows(middle, parent.end, parent.padded),
        ]
    return rows
