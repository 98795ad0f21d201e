"""The engine's own layout of the weights: which part of which Hugging Face tensor lies where in which parameter.

SGLang joins the query, key and value projections into `qkv_proj`, the gate and up projections into `gate_up_proj` and
the experts of a layer into one tensor; it pads the vocabulary, repeats key and value heads where there are more ranks
than heads, and gives each tensor-parallel rank its part: rows of column-parallel layers and of the vocabulary, columns
of row-parallel layers. Joined rows are neighbours, so each part is one contiguous copy, once columns lie by rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from miles_async.errors import FatalError

Shape = tuple[int, ...]

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
}
"""Projection: the parameter it is part of, and its place in it."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
"""Mixtral numbers its projections."""
_VOCABULARY = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head)\.weight")


@dataclass(frozen=True, slots=True)
class Copy:
    """`numel` elements of a tensor, from `source` on as it is staged, to `target` in a parameter of a rank."""

    rank: int
    parameter: str
    source: int
    target: int
    numel: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one Hugging Face tensor goes."""

    name: str
    shape: Shape
    columns: int
    """The parts that its columns are staged in, one after the other; 1 where it is staged as it is."""
    copies: tuple[Copy, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def place(tensors: Iterable[tuple[str, Shape]], ranks: Sequence[Mapping[str, Shape]]) -> list[Placement]:
    """Plan the way of every tensor. `ranks` are the engine's parameters, one mapping per tensor-parallel rank.

    Raises Fatal when engine and learner do not hold the same model.
    """
    tensors = list(tensors)
    rows = {name: shape[0] for name, shape in tensors}
    placements, covered = [], dict.fromkeys(ranks[0], 0)
    for name, shape in tensors:
        target = _target(name)
        if target not in ranks[0]:
            if _VOCABULARY.fullmatch(name):
                continue  # a tied output layer has no memory of its own in the engine
            raise FatalError(f"the engine serves another model: it has no parameter {target} for {name}")
        columns, copies = _copies(name, shape, target, ranks, rows)
        placements.append(Placement(name, shape, columns, tuple(copies)))
        covered[target] += sum(copy.numel for copy in copies if copy.rank == 0)
    for target, filled in covered.items():
        whole = math.prod(ranks[0][target])
        if filled == 0:
            raise FatalError(f"the engine serves another model: the learner has nothing for its parameter {target}")
        if filled != whole and not _VOCABULARY.fullmatch(target):
            raise _misfit(target, f"{whole} elements", f"{filled}")
    return placements


def _target(name: str) -> str:
    """The engine's parameter that a Hugging Face tensor is part of."""
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.{'w2' if expert[3] in ('down_proj', 'w2') else 'w13'}_weight"
    module, _, kind = name.rpartition(".")
    path, _, layer = module.rpartition(".")
    fused, _ = _FUSED.get(layer, (layer, 0))
    return ".".join(part for part in (path, fused, kind) if part)


def _copies(
    name: str, shape: Shape, target: str, ranks: Sequence[Mapping[str, Shape]], rows: Mapping[str, int]
) -> tuple[int, list[Copy]]:
    there = ranks[0][target]
    first, expert = 0, _EXPERT.fullmatch(name)
    if expert:
        if int(expert[2]) >= there[0]:
            raise _misfit(target, f"{there[0]} experts", f"{int(expert[2]) + 1} at least")
        there = there[1:]
        first = int(expert[2]) * math.prod(there)
    if len(there) != len(shape):
        raise _misfit(target, f"the shape {there}", f"{name} of {shape}")
    if len(shape) == 2 and there[1] != shape[1]:
        if there[1] * len(ranks) != shape[1] or there[0] != shape[0]:
            raise _misfit(target, f"the shape {there} on each of {len(ranks)} ranks", f"{name} of {shape}")
        part = math.prod(there)
        return len(ranks), [Copy(rank, target, rank * part, first, part) for rank in range(len(ranks))]
    width = math.prod(shape[1:])
    copies = []
    for rank in range(len(ranks)):
        start, count, above = _rows(name, shape[0], there[0], rank, len(ranks), rows)
        copies.append(Copy(rank, target, start * width, first + above * width, count * width))
    return 1, copies


def _rows(name: str, total: int, there: int, rank: int, ranks: int, rows: Mapping[str, int]) -> tuple[int, int, int]:
    """A rank's rows of a tensor, first and number, and how many rows lie above them in the parameter."""
    layer = name.rpartition(".")[0].rpartition(".")[2]
    fused, place_in_it = _FUSED.get(layer, ("", 0))
    if fused == "qkv_proj":
        query = rows[name.replace(layer, "q_proj")] // ranks
        key = (there - query) // 2
        count = key if place_in_it else query
        above = (0, query, query + key)[place_in_it]
        # With fewer heads than ranks, neighbours hold the same ones.
        start = rank // max(1, count * ranks // total) * count
        return start, count, above
    if fused == "gate_up_proj":
        return rank * (total // ranks), total // ranks, place_in_it * (there // 2)
    if _VOCABULARY.fullmatch(name) and there * ranks >= total:
        start = min(rank * there, total)
        return start, min(there, total - start), 0
    if there == total:
        return 0, total, 0
    if there * ranks != total:
        raise _misfit(_target(name), f"{there} rows on each of {ranks} ranks", f"{total}")
    return rank * there, there, 0


def _misfit(target: str, engine: str, learner: str) -> FatalError:
    return FatalError(f"the engine serves another model: {target} has {engine} there, and {learner} in the learner")
