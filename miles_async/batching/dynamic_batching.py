"""Dynamic batching as in ROLL: sort samples by length, divide them among ranks, and pad within each micro-batch.

Packing (`batching/packing.py`) is the default and needs no padding. Dynamic batching is for models or kernels that need
rows of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Bin = list[int]
"""Indices of the samples that are the rows of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one micro-batch. All ranks use the same ranges and the same padded length."""

    start: int
    """The micro-batch holds the samples `[start, end)` of each rank's shard."""
    end: int
    padded: int
    """Tokens per row."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.count * self.padded


@dataclass(frozen=True, slots=True)
class DynamicBatches:
    """A plan for all ranks."""

    bins: list[list[Bin]]
    """`bins[rank][micro_batch]`; a bin is empty if its rank has no sample for that micro-batch."""
    padded: list[int]
    """Tokens per row, by micro-batch; the same on all ranks."""


def dynamic_batches(
    lengths: Sequence[int], ranks: int, *, max_tokens: int, round_to: int, multiple: int = 1
) -> DynamicBatches:
    """Plan micro-batches of at most `max_tokens` tokens, with rows padded to a multiple of `round_to` tokens.

    The number of micro-batches per rank is a multiple of `multiple` (pipeline stages).

    Example: lengths 7, 6, 8, 5, 1, 3, 8, 6 on two ranks with `round_to=2` give each rank micro-batches of 2x6, 1x8 and
    1x8 tokens if `max_tokens` is 12 to 15, as in ROLL's illustration. With `max_tokens=10` two rows of 6 tokens do not
    fit, so each rank gets four micro-batches of one row (4, 6, 8 and 8 tokens).

    Raises ValueError if a sample, rounded up, exceeds `max_tokens`.
    """
    shards = sort_and_shard(lengths, ranks)
    # All ranks use the same padded lengths, so each row is as long as the longest one at that position of any shard.
    longest = [max(0 if i is None else lengths[i] for i in row) for row in zip(*shards, strict=True)]
    plan = split_to_multiple(partition(longest, max_tokens=max_tokens, round_to=round_to), multiple, round_to)
    bins = [[[i for i in shard[rows.start : rows.end] if i is not None] for rows in plan] for shard in shards]
    return DynamicBatches(bins, [rows.padded for rows in plan])


def sort_and_shard(lengths: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Sort the samples by length and deal them to the ranks: rank r takes every `ranks`-th sample from the r-th on.

    Samples at the same position of different shards then have similar lengths. If the samples do not divide evenly,
    the shards of the first ranks start with None, which means no sample.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    order = [*[None] * (-len(lengths) % ranks), *by_length]
    return [order[rank::ranks] for rank in range(ranks)]


def partition(longest: Sequence[int], *, max_tokens: int, round_to: int) -> list[Rows]:
    """Divide rows into micro-batches with as many rows as `max_tokens` allows.

    `longest[i]` is the length of the longest i-th row of any rank, ascending.

    Raises ValueError if a single row does not fit.
    """
    plan: list[Rows] = []
    for row, length in enumerate(longest):
        padded = length + -length % round_to
        if padded > max_tokens:
            raise ValueError(
                f"a sample of {length} tokens, rounded up to {padded}, exceeds the micro-batch limit of {max_tokens}; "
                "raise max_tokens_per_microbatch_in_train and _in_infer, or lower rollout_max_response_len"
            )
        if plan and (plan[-1].count + 1) * padded <= max_tokens:
            plan[-1] = Rows(plan[-1].start, row + 1, padded)
        else:
            plan.append(Rows(row, row + 1, padded))
    return plan


def split_to_multiple(plan: Sequence[Rows], multiple: int, round_to: int = 1) -> list[Rows]:
    """Halve the micro-batch with the most tokens until their number is a multiple of `multiple`.

    Halves keep the padded length of the original. If no micro-batch has two rows, empty ones are appended instead.
    """
    rows = list(plan) or [Rows(0, 0, round_to)]
    while len(rows) % multiple:
        largest = max(range(len(rows)), key=lambda i: (rows[i].count > 1, rows[i].tokens, -i))
        parent = rows[largest]
        if parent.count <= 1:
            end = rows[-1].end
            rows += [Rows(end, end, round_to)] * (-len(rows) % multiple)
            break
        middle = (parent.start + parent.end + 1) // 2
        rows[largest : largest + 1] = [
            Rows(parent.start, middle, parent.padded),
            Rows(middle, parent.end, parent.padded),
        ]
    return rows
