"""The engine's weight layout: where each part of a Hugging Face tensor goes in the engine's parameters.

SGLang fuses the query, key and value projections into `qkv_proj`, the gate and up projections into `gate_up_proj`, and
the experts of a layer into one tensor. It pads the vocabulary, repeats key and value heads if there are more ranks than
heads, and gives each tensor-parallel rank its part: rows of column-parallel layers and of the vocabulary, columns of
row-parallel layers. Fused projections are stacked by rows. So each part is one contiguous copy, provided that the
staging buffer keeps the columns of a row-parallel tensor grouped by rank (`TensorPlan.columns`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

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
"""By projection: the fused parameter that contains it, and its index in the stack of rows."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
"""Mixtral calls the projections w1 (gate), w2 (down) and w3 (up)."""
_VOCABULARY = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head)\.weight")


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous copy of `numel` elements to a parameter of an engine rank.

    `source` is the first element in the staged tensor, `target` the first element in the parameter.
    """

    rank: int
    parameter: str
    source: int
    target: int
    numel: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All copies that bring one Hugging Face tensor to the ranks of an engine."""

    name: str
    shape: Shape
    columns: int
    """Number of column blocks that are staged one after the other; 1 if the tensor is staged in its own order."""
    copies: tuple[Copy, ...]
    offset: float = 0.0
    """SGLang's loader adds this number to each element, so the engine's memory holds the sum."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def plan_tensors(
    tensors: Iterable[tuple[str, Shape]],
    ranks: Sequence[Mapping[str, Shape]],
    offsets: Mapping[str, float] = MappingProxyType({}),
) -> list[TensorPlan]:
    """Plan the copies of every tensor, in the order of `tensors`.

    `tensors` are Hugging Face names and full shapes; `ranks` are the engine's parameter shapes, one mapping per
    tensor-parallel rank; `offsets` are those of `TensorPlan` that are not 0, by name. Raises FatalError if engine and
    learner do not hold the same model.
    """
    tensors = list(tensors)
    rows = {name: shape[0] for name, shape in tensors}
    plans, covered = [], dict.fromkeys(ranks[0], 0)
    for name, shape in tensors:
        target = _target(name)
        if target not in ranks[0]:
            if _VOCABULARY.fullmatch(name):
                continue  # a tied output layer shares the memory of the embedding
            raise FatalError(f"the engine serves another model: it has no parameter {target} for {name}")
        columns, copies = _copies(name, shape, target, ranks, rows)
        plans.append(TensorPlan(name, shape, columns, tuple(copies), offsets.get(name, 0.0)))
        covered[target] += sum(copy.numel for copy in copies if copy.rank == 0)
    # Rank 0 represents all ranks. Only the padding of a vocabulary may remain unwritten.
    for target, filled in covered.items():
        whole = math.prod(ranks[0][target])
        if filled == 0:
            raise FatalError(f"the engine serves another model: the learner has nothing for its parameter {target}")
        if filled != whole and not _VOCABULARY.fullmatch(target):
            raise _mismatch(target, f"{whole} elements", f"{filled}")
    return plans


def _target(name: str) -> str:
    """Return the engine's parameter that contains a Hugging Face tensor."""
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.{'w2' if expert[3] in ('down_proj', 'w2') else 'w13'}_weight"
    module, _, kind = name.rpartition(".")
    path, _, layer = module.rpartition(".")
    fused, _ = _FUSED.get(layer, (layer, 0))
    return ".".join(part for part in (path, fused, kind) if part)


def _copies(
    name: str, shape: Shape, target: str, ranks: Sequence[Mapping[str, Shape]], rows: Mapping[str, int]
) -> tuple[int, list[Copy]]:
    """Return `TensorPlan.columns` and the copies of one tensor."""
    parameter = ranks[0][target]
    first, expert = 0, _EXPERT.fullmatch(name)
    if expert:
        # An expert is one slice of the fused tensor: go on with the shape of the slice, after the experts before it.
        if int(expert[2]) >= parameter[0]:
            raise _mismatch(target, f"{parameter[0]} experts", f"{int(expert[2]) + 1} at least")
        parameter = parameter[1:]
        first = int(expert[2]) * math.prod(parameter)
    if len(parameter) != len(shape):
        raise _mismatch(target, f"the shape {parameter}", f"{name} of {shape}")
    if len(shape) == 2 and parameter[1] != shape[1]:
        # Row-parallel: each rank holds a block of columns, which is contiguous because it is staged as a block.
        if parameter[1] * len(ranks) != shape[1] or parameter[0] != shape[0]:
            raise _mismatch(target, f"the shape {parameter} on each of {len(ranks)} ranks", f"{name} of {shape}")
        block = math.prod(parameter)
        return len(ranks), [Copy(rank, target, rank * block, first, block) for rank in range(len(ranks))]
    width = math.prod(shape[1:])
    copies = []
    for rank in range(len(ranks)):
        start, count, above = _rows(name, shape[0], parameter[0], rank, len(ranks), rows)
        copies.append(Copy(rank, target, start * width, first + above * width, count * width))
    return 1, copies


def _rows(name: str, total: int, held: int, rank: int, ranks: int, rows: Mapping[str, int]) -> tuple[int, int, int]:
    """Return a rank's rows of a tensor: first row, number of rows, and the rows above them in the rank's parameter.

    `total` is the number of rows of the tensor, `held` that of the rank's parameter, `rows` that of all tensors.
    """
    layer = name.rpartition(".")[0].rpartition(".")[2]
    fused, index = _FUSED.get(layer, ("", 0))
    if fused == "qkv_proj":
        # The parameter stacks query, key and value rows; the rows that are not query rows are half keys, half values.
        query = rows[name.replace(layer, "q_proj")] // ranks
        key = (held - query) // 2
        count = key if index else query
        above = (0, query, query + key)[index]
        # With fewer key heads than ranks, neighbouring ranks hold the same heads.
        start = rank // max(1, count * ranks // total) * count
        return start, count, above
    if fused == "gate_up_proj":
        return rank * (total // ranks), total // ranks, index * (held // 2)
    if _VOCABULARY.fullmatch(name) and held * ranks >= total:
        # The vocabulary is padded to a multiple of the ranks: the last ranks may have fewer real rows, or none.
        start = min(rank * held, total)
        return start, min(held, total - start), 0
    if held == total:
        return 0, total, 0
    if held * ranks != total:
        raise _mismatch(_target(name), f"{held} rows on each of {ranks} ranks", f"{total}")
    return rank * held, held, 0


def _mismatch(target: str, engine: str, learner: str) -> FatalError:
    return FatalError(
        f"the engine serves another model: {target} has {engine} in the engine, and {learner} in the learner"
    )
