"""Which linear layers of a checkpoint one of Megatron's linear layers holds, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Columns(NamedTuple):
    """Adjacent outputs of one of Megatron's layers that are rows of a layer of the checkpoint."""

    of_output: slice
    of_rows: slice


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer of the checkpoint, or what this rank has of it, in one of Megatron's."""

    name: str
    """The layer's name in the checkpoint, such as `model.layers.0.self_attn.q_proj`."""
    columns: Sequence[Columns]
    """All outputs of the layer on this rank."""
    pieces: Sequence[int]
    """Outputs on this rank of each of the pieces that tensor-parallel ranks divide one by one, in the checkpoint's
    order."""


def stacked(names: Sequence[str], pieces: Sequence[Sequence[int]]) -> list[Part]:
    """Layers whose outputs follow each other; `pieces` are those of each layer."""
    ends = accumulate(map(sum, pieces))
    return [
        Part(name, [Columns(slice(end - sum(own), end), slice(0, sum(own)))], own)
        for name, end, own in zip(names, ends, pieces, strict=True)
    ]


def equal(names: Sequence[str], outputs: int) -> list[Part]:
    """Layers of the same size, which have `outputs` on this rank together."""
    return stacked(names, [[outputs // len(names)]] * len(names))


def query_key_value(names: Sequence[str], *, heads: int, groups: int, width: int, has_gate: bool = False) -> list[Part]:
    """Projections of queries, keys and values, which Megatron groups by key/value head.

    `heads` and `groups` are query and key/value heads on this rank, of this `width`. With a gate, the projection of
    queries has the rows of each head's query and of its gate, and Megatron has the queries of a group before its gates.
    """
    per_group, sides, position = heads // groups, 2 if has_gate else 1, 0
    queries, keys, values = list[Columns](), list[Columns](), list[Columns]()

    def take(layer: list[Columns], first: int) -> None:
        nonlocal position
        layer.append(Columns(slice(position, position + width), slice(first, first + width)))
        position += width

    for group in range(groups):
        for side in range(sides):
            for head in range(group * per_group, (group + 1) * per_group):
                take(queries, (head * sides + side) * width)
        take(keys, group * width)
        take(values, group * width)
    sizes = (heads * sides * width, groups * width, groups * width)
    layers = zip(names, (queries, keys, values), sizes, strict=True)
    return [Part(name, _joined(own), [size]) for name, own, size in layers]


def _joined(columns: Sequence[Columns]) -> list[Columns]:
    """The same, with one entry for columns that follow each other on both sides."""
    joined: list[Columns] = []
    for one in columns:
        last = joined[-1] if joined else None
        if last and (last.of_output.stop, last.of_rows.stop) == (one.of_output.start, one.of_rows.start):
            joined[-1] = Columns(
                slice(last.of_output.start, one.of_output.stop), slice(last.of_rows.start, one.of_rows.stop)
            )
        else:
            joined.append(one)
    return joined
