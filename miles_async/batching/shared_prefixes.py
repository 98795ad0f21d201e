"""Common prefixes of samples, which the learner computes once.

The samples of a group have the same prompt, and often the same first tokens of the response. The segments of an agent's
trajectory begin with the history that they share. A causal model computes the same hidden states for a common prefix in
every sample, so the learner can compute it once: the other samples attend to its keys, and its gradients add up over
the samples. Tree Training (arXiv 2511.00413) does this for agents' turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_async.batching.layout import positions_of
from miles_async.types import Sample


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples that are packed into the same micro-batch, next to each other."""

    members: list[int]
    """Indices of the samples, in the order in which they are packed."""
    tokens: int
    """Number of tokens that the model computes for them."""
    square: int
    """Twice the number of query-key pairs of their attention: the squared length for a single sample."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences laid end to end. The model computes their common prefixes once."""

    lengths: NDArray[np.int64]
    """[n] tokens of the whole sequences, T in all."""
    shared: NDArray[np.int64]
    """[n] number of leading tokens that each sequence has in common with the one before it."""
    computed: NDArray[np.int64]
    """[t] indices among the T tokens of those that the model computes."""
    index: NDArray[np.int64]
    """[T] index among the t computed tokens of the one that stands for each token."""

    @staticmethod
    def of(lengths: NDArray[np.int64], shared: NDArray[np.int64] | None = None) -> Pack:
        """Lay out sequences; without `shared` every token is computed."""
        total = int(lengths.sum())
        if shared is None or not shared.any():
            everything = np.arange(total)
            return Pack(lengths, np.zeros_like(lengths), everything, everything)
        starts = np.cumsum(lengths) - lengths
        own = positions_of(lengths) >= np.repeat(shared, lengths)
        index = np.cumsum(own) - 1
        # The sequence before may itself share this prefix, so the sequences are resolved in order.
        for number in np.flatnonzero(shared):
            start, before, count = starts[number], starts[number - 1], shared[number]
            index[start : start + count] = index[before : before + count]
        return Pack(lengths, shared, np.flatnonzero(own), index)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[T] position of each token in its sequence."""
        return positions_of(self.lengths)

    def reader_ends(self) -> NDArray[np.int64]:
        """[t] index after the last computed token whose history contains each computed token.

        Computed tokens are in the order of a depth-first walk through the tree of prefixes. The tokens whose history
        contains token j are therefore its subtree, which is the range from j to this index.
        """
        last = np.zeros(len(self.computed), np.int64)
        # The sequences with a common prefix are adjacent; the last of them is the highest number.
        np.maximum.at(last, self.index, np.repeat(np.arange(len(self.lengths)), self.lengths))
        ends: NDArray[np.int64] = np.cumsum(self.lengths - self.shared)[last]
        return ends


def visible_blocks(ends: NDArray[np.int64], size: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Divide the attention of the t tokens with these `Pack.reader_ends` into blocks of `size` queries and keys.

    Returns two [n, n] matrices over blocks of queries and blocks of keys: the blocks in which some queries attend to
    some keys but not all to all, and those in which all queries attend to all keys.
    """
    starts = np.arange(0, len(ends), size)
    stops = np.minimum(starts + size, len(ends))
    # A key j is visible to the queries from j to ends[j], so below the diagonal only these ends matter.
    below = np.tri(len(starts), k=-1, dtype=bool)
    some = below & (np.maximum.reduceat(ends, starts) > starts[:, None])
    full = below & (np.minimum.reduceat(ends, starts) >= stops[:, None])
    return some & ~full | np.eye(len(starts), dtype=bool), full


def prefix_units(samples: Sequence[Sample], groups: Sequence[int], *, cap: int, at_most: int) -> list[Unit]:
    """Put the samples of each group that have a common prefix into units.

    A unit has at most `cap` computed tokens and `at_most` samples. `groups` are the numbers of the samples' groups; the
    samples of a group are consecutive.

    Within a unit the samples are sorted by their tokens, so that each one has the longest possible prefix in common
    with the sample before it. A sample that is longer than `cap` is a unit by itself.
    """
    units: list[Unit] = []
    start = 0
    for end in range(1, len(samples) + 1):
        if end == len(samples) or groups[end] != groups[start]:
            units += _divide(samples, range(start, end), cap, at_most)
            start = end
    return units


def common_prefixes(sequences: Sequence[Sequence[int] | NDArray[Any]]) -> NDArray[np.int64]:
    """[n] number of leading tokens that each sequence has in common with the one before it; 0 for the first."""
    arrays = [np.asarray(sequence) for sequence in sequences]
    lengths = [0, *(_common(before, after) for before, after in pairwise(arrays))]
    return np.array(lengths[: len(arrays)], np.int64)


def _divide(samples: Sequence[Sample], members: Sequence[int], cap: int, at_most: int) -> list[Unit]:
    """Divide the samples of a group into units."""
    tokens = {i: np.asarray(samples[i].tokens) for i in members}
    # The bytes of big-endian integers have the order of the lists of integers.
    ordered = sorted(members, key=lambda i: tokens[i].astype(">i4").tobytes())
    shared = common_prefixes([tokens[i] for i in ordered])
    units: list[Unit] = []
    for i, prefix in zip(ordered, shared.tolist(), strict=True):
        length = len(tokens[i])
        unit = units[-1] if units else None
        if unit is None or not prefix or len(unit.members) >= at_most or unit.tokens + length - prefix > cap:
            units.append(Unit([i], length, length**2))
        else:
            units[-1] = Unit([*unit.members, i], unit.tokens + length - prefix, unit.square + length**2 - prefix**2)
    return units


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    shorter = min(len(one), len(other))
    different = one[:shorter] != other[:shorter]
    return int(different.argmax()) if different.any() else shorter
