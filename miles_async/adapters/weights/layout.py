"""The engines' weight layout: which copies bring each Hugging Face tensor into the engines' parameters.

An engine says where SGLang's loader puts the elements of each tensor (`adapters/sglang/weight_placement.py`). Usually
every part is contiguous in the tensor and in the parameter. Where it is not, such as the columns of a row-parallel
layer, the staging buffer keeps the part in the order of the engine's memory, so that one contiguous copy is enough.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from miles_async.adapters.sglang.engine_weights import Placement, RankLayout, Shape
from miles_async.errors import FatalError
from miles_async.models.text_part import is_of_images

TensorDescription = tuple[str, Shape, str]
"""Hugging Face name, full shape, and torch's name of the dtype, such as `bfloat16`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided part of a flat tensor, which is staged in the order of the engine's memory."""

    source: int
    shape: Shape
    strides: Shape
    offset: float = 0.0
    """What is added to each element before it is staged."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


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
    dtype: str
    """In which the tensor is staged: that of the engine's parameter."""
    copies: tuple[Copy, ...] = ()
    """Empty if SGLang's loader has to load the tensor."""
    pieces: tuple[Piece, ...] = ()
    """The parts that are staged one after the other; empty if the tensor is staged in its own order."""

    @property
    def block(self) -> str:
        """The part of the model that holds the tensor, such as the attention of a layer, or one expert.

        SGLang's loader may need several tensors of a block at once. For example, it concatenates two projections of
        DeepSeek's attention, and ignores one that comes without the other. So a block is sent as a whole.
        """
        return self.name.rsplit(".", 2)[0]

    @property
    def numel(self) -> int:
        """Number of staged elements."""
        return sum(piece.numel for piece in self.pieces) if self.pieces else math.prod(self.shape)


def plan_tensors(
    tensors: Sequence[TensorDescription], ranks: Sequence[RankLayout], dtypes: Mapping[str, str]
) -> list[TensorPlan]:
    """Plan the copies of every tensor, in the order of `tensors`.

    `ranks` are the layouts of an engine's tensor-parallel ranks, and `dtypes` those of its parameters. Raises
    FatalError if engine and learner do not hold the same model, or if SGLang quantizes weights.
    """
    for layout in ranks:
        if layout.quantized is not None:
            raise FatalError(
                f"the engine quantises its parameter {layout.quantized}, and the learner's weights are not quantised: "
                "start the engines without quantisation"
            )
        if layout.refused is not None:
            raise FatalError(f"the engine serves another model: SGLang refuses the learner's tensors: {layout.refused}")
        if unfilled := [parameter for parameter in layout.unfilled if not is_of_images(parameter)]:
            parameter = unfilled[0]
            raise FatalError(f"the engine serves another model: the learner does not fill its parameter {parameter}")
    placements: defaultdict[int, list[tuple[int, Placement]]] = defaultdict(list)
    for rank, layout in enumerate(ranks):
        for placement in layout.placements:
            placements[placement.tensor].append((rank, placement))
    plans = []
    for number, (name, shape, _) in enumerate(tensors):
        if number in placements:
            plans.append(_plan(name, shape, placements[number], dtypes))
        elif not name.endswith("lm_head.weight"):  # a tied output layer shares the memory of the embedding
            raise FatalError(f"the engine serves another model: it has no parameter for {name}")
    return plans


def plans_by_name(tensors: Sequence[TensorDescription]) -> list[TensorPlan]:
    """Plan to send whole tensors under their names, so that SGLang's loader loads them."""
    return [TensorPlan(name, shape, dtype) for name, shape, dtype in tensors]


def _plan(
    name: str, shape: Shape, placements: Sequence[tuple[int, Placement]], dtypes: Mapping[str, str]
) -> TensorPlan:
    dtype, whole = dtypes[placements[0][1].parameter], Piece(0, (math.prod(shape),), (1,))
    has_offsets = any(part.offset for _, part in placements)
    in_order = not has_offsets and all(len(part.shape) <= 1 and set(part.strides) <= {1} for _, part in placements)
    # Transports that use SGLang's loader send the tensor as it is, because the loader adds the offset.
    staged, size = ({whole: 0}, whole.numel) if has_offsets else ({}, 0)
    copies = []
    for rank, part in placements:
        piece = Piece(part.source, part.shape, part.strides, part.offset)
        if not in_order and piece not in staged:
            staged[piece] = size
            size += piece.numel
        first = part.source if in_order else staged[piece]
        for position, target, numel in _contiguous(part):
            copies.append(Copy(rank, part.parameter, first + position, target, numel))
    return TensorPlan(name, shape, dtype, tuple(copies), tuple(staged))


def _contiguous(part: Placement) -> Iterator[tuple[int, int, int]]:
    """Divide a part into pieces that are contiguous in the parameter: position in the part, target, elements."""
    outer, numel = len(part.shape), 1
    while outer and part.target_strides[outer - 1] == numel:
        outer -= 1
        numel *= part.shape[outer]
    for number, indices in enumerate(itertools.product(*map(range, part.shape[:outer]))):
        steps = sum(index * stride for index, stride in zip(indices, part.target_strides, strict=False))
        yield number * numel, part.target + steps, numel
