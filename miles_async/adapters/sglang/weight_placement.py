"""Finds out where SGLang's loader puts the elements of a checkpoint's tensors. Runs inside SGLang's schedulers.

A transport that writes into an engine's memory bypasses SGLang's loader, which fuses projections, stacks experts, pads
the vocabulary and gives each rank its part, differently for each architecture. The loader itself says what it does: it
loads tensors whose elements are numbers of elements, and the parameters then tell which elements they hold. Numbers are
loaded digit by digit, because bfloat16 represents no integers above 256.

At the end the loader loads other values, and every parameter must hold what the placements predict. So a loader that
computes with values, or that derives further tensors from them, is noticed; such an engine gets its weights through the
loader (`layout.plans_by_name`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_async.adapters.sglang.engine_weights import Model, Placement, RankLayout, tensors_of

Named = Sequence[tuple[str, Sequence[int]]]
"""Names and shapes of the tensors of a checkpoint."""
_LAYER = re.compile(r"\.\d+\.")
"""The number of a layer in the names of its tensors and parameters."""
_GROUP_ELEMENTS = 1 << 26
"""Elements of the tensors that are numbered together, unless one tensor has more. The numbers take memory."""
_PART = 1 << 24
"""Elements of a tensor whose values are computed at once."""
_SHIFTS = 1 << 16
"""Number of ways in which the values of two tensors differ."""
_MOST_PLACEMENTS = 1 << 17
"""More placements than this are no layout that one-sided writes could use."""


class UnknownLayoutError(Exception):
    """The loader does not only copy elements."""


@torch.no_grad()
def find_placements(model: Model, tensors: Named) -> RankLayout:
    """Return what SGLang's loader does with `tensors`; the model is the same afterwards."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.itemsize < 2:
            # The loader would copy weights into it without their scales.
            return RankLayout(quantized=f"{name} ({str(parameter.dtype).removeprefix('torch.')})")
    _wait_for_gpu()  # a batch may still be computed with the weights
    search = _Search(model, tensors)
    try:
        search.find(layers_alike=True)
        if search.difference() is not None:
            search.find(layers_alike=False)
            if (name := search.difference()) is not None:
                raise _computed(name)
        return RankLayout(placements=search.placements, unfilled=search.unfilled)
    except UnknownLayoutError as error:
        return RankLayout(unknown=str(error))
    except torch.OutOfMemoryError:
        return RankLayout(
            unknown="the engine has too little memory left to find out where SGLang's loader puts the weights"
        )
    except Exception as error:
        # The loaders of SGLang's models raise whatever they meet: KeyError, AssertionError, RuntimeError.
        return RankLayout(refused=f"{type(error).__name__}: {error}")
    finally:
        search.restore()
        _wait_for_gpu()


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _computed(parameter: str) -> UnknownLayoutError:
    return UnknownLayoutError(f"SGLang's loader computes what its parameter {parameter} holds")


_Group = list[tuple[int, int]]
"""Tensors whose elements are numbered together: the number of each, and that of its first element."""


class _Search:
    def __init__(self, model: Model, tensors: Named) -> None:
        self._model = model
        self._tensors = tensors
        self._weights = {name: tensor.data for name, tensor in tensors_of(model).items() if tensor.is_floating_point()}
        """The parameters and buffers into which a loader may write."""
        self._parameters = {name for name, _ in model.named_parameters()}
        self._dtype = Counter(weight.dtype for weight in self._weights.values()).most_common(1)[0][0]
        """The type in which tensors are loaded: that of most parameters."""
        self._before = {name: weight.to("cpu", copy=True) for name, weight in self._weights.items()}
        memory = {weight.untyped_storage().data_ptr() for weight in self._weights.values()}
        self._derived = [
            (module, name, value, value.clone())
            for module in model.modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in memory
        ]
        """Tensors that modules keep besides their parameters and buffers, and not in the memory of these."""
        self.placements: list[Placement] = []
        self.unfilled: list[str] = []

    def find(self, *, layers_alike: bool) -> None:
        """Set `placements`.

        With `layers_alike` only one layer of each kind is numbered. The others are expected to be like it, and
        `difference` finds out whether they are.
        """
        self.placements, self.unfilled = [], []
        self._fill_with_nan(self._weights)
        models = self._models() if layers_alike else list(range(len(self._tensors)))
        for group in self._groups(sorted(set(models))):
            written, offsets, numbers = self._number(group)
            for name in written:
                self._add(name, group, numbers[name].flatten().cpu().numpy(), offsets[name])
            self._fill_with_nan(written)
        by_tensor: dict[int, list[Placement]] = {}
        for placement in self.placements:
            by_tensor.setdefault(placement.tensor, []).append(placement)
        for number, model in enumerate(models):
            for placement in by_tensor.get(model, []) if number != model else ():
                self._add_alike(number, placement)

    def _models(self) -> list[int]:
        """For each tensor, the number of the first one with the same name, apart from the layer, and the same shape."""
        first: dict[tuple[str, tuple[int, ...]], int] = {}
        return [
            first.setdefault((_LAYER.sub(".N.", name, count=1), tuple(shape)), number)
            for number, (name, shape) in enumerate(self._tensors)
        ]

    def _add_alike(self, number: int, placement: Placement) -> None:
        """Add a placement of a tensor in another layer."""
        layer = _LAYER.search(self._tensors[number][0])
        assert layer is not None, "its name differs from that of the other tensor"
        name = _LAYER.sub(layer[0], placement.parameter, count=1)
        self.placements.append(msgspec.structs.replace(placement, tensor=number, parameter=name))

    def difference(self) -> str | None:
        """Load other values; return a parameter that does not hold what the placements predict, or None.

        Sets `unfilled`. Raises UnknownLayoutError if the loader derives further tensors from the weights.
        """
        largest = max((math.prod(shape) for _, shape in self._tensors), default=0)
        values = _mixed_integers(largest + _SHIFTS, self._dtype)

        def of_tensor(number: int, size: int) -> Tensor:
            start = 7919 * number % _SHIFTS
            return values[start : start + size]

        self._load(range(len(self._tensors)), of_tensor)
        for module, name, value, before in self._derived:
            if vars(module).get(name) is not value or not torch.equal(value.nan_to_num(), before.nan_to_num()):
                raise UnknownLayoutError(
                    f"SGLang's loader derives {name} of a {type(module).__name__} from the weights"
                )
        by_parameter: dict[str, list[Placement]] = {}
        for placement in self.placements:
            by_parameter.setdefault(placement.parameter, []).append(placement)
        if missing := by_parameter.keys() - self._weights.keys():
            return min(missing)
        for name, weight in self._weights.items():
            expected, found = torch.full_like(weight, torch.nan).flatten(), weight.flatten()
            for placement in by_parameter.get(name, []):
                part = of_tensor(placement.tensor, math.prod(self._tensors[placement.tensor][1]))
                first = part.storage_offset() + placement.source
                part = part.as_strided(placement.shape, placement.strides, first)
                held = expected.as_strided(placement.shape, placement.target_strides, placement.target).copy_(part)
                if placement.offset:
                    held.add_(placement.offset)
            if torch.equal(found, expected):
                continue
            empty = expected.isnan()
            if name in self._parameters and bool(found[empty].isnan().any()):
                self.unfilled.append(name)
            # The loader pads a vocabulary with zeros.
            empty &= found.isnan() | (found == 0)
            if not torch.equal(found[~empty], expected[~empty]):
                return name
        return None

    def restore(self) -> None:
        for name, weight in self._weights.items():
            weight.copy_(self._before[name])
        for module, name, value, before in self._derived:
            value.copy_(before)
            vars(module)[name] = value

    def _groups(self, chosen: Sequence[int]) -> Iterator[_Group]:
        # 0 is for elements of no tensor. Numbers of different tensors are never consecutive.
        group: _Group = []
        elements = 2
        for number in chosen:
            shape = self._tensors[number][1]
            if group and elements + math.prod(shape) > _GROUP_ELEMENTS:
                yield group
                group, elements = [], 2
            group.append((number, elements))
            elements += math.prod(shape) + 1
        if group:
            yield group

    def _number(self, group: _Group) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Load the numbers of elements. Returns, by parameter that the loader fills: which elements it writes, what it
        adds to them, and the number of each, which is 0 for an element of no tensor."""
        chosen = [number for number, _ in group]
        self._load(chosen, lambda _, size: torch.zeros(size, dtype=self._dtype))
        written = {name: ~weight.isnan() for name, weight in self._weights.items()}
        written = {name: elements for name, elements in written.items() if bool(elements.any())}
        offsets = {name: self._weights[name].clone() for name in written}
        firsts, end = dict(group), group[-1][1] + math.prod(self._tensors[group[-1][0]][1])
        numbers = {name: torch.zeros_like(self._weights[name], dtype=_integer(end)) for name in written}
        partly = {name: elements for name, elements in written.items() if not bool(elements.all())}
        # Integers that all these types represent, also after an offset of 1 or 2 is added.
        bits = min(map(_exact_bits, (self._dtype, *(self._weights[name].dtype for name in written))))
        for shift in range(0, end.bit_length(), bits):

            def digits(number: int, size: int, shift: int = shift) -> Tensor:
                start = firsts[number]
                elements = torch.arange(start, start + size, dtype=_integer(end))
                return elements.bitwise_right_shift_(shift).bitwise_and_((1 << bits) - 1)

            self._load(chosen, digits)
            for name in written:
                found = self._weights[name] - offsets[name]
                if name in partly:
                    found = found.where(partly[name], 0.0)
                digit = found.to(_integer(end))
                if not torch.equal(digit.to(found.dtype), found):
                    raise _computed(name)
                numbers[name] += digit.bitwise_left_shift_(shift)
        for name, found in numbers.items():
            if not 0 <= int(found.min()) <= int(found.max()) < end:
                raise _computed(name)
        return written, offsets, numbers

    def _add(self, name: str, group: _Group, numbers: NDArray[Any], offsets: Tensor) -> None:
        """Add the placements of a parameter, whose elements have these numbers."""
        firsts = np.array([first for _, first in group])
        added = offsets.flatten()
        for source, target, form in strided_parts(numbers, firsts):
            number, first = group[int(np.searchsorted(firsts, source, side="right")) - 1]
            offset = float(added[target])
            if not bool((added.as_strided(form.shape, form.target_strides, target) == offset).all()):
                raise UnknownLayoutError(f"SGLang's loader adds different numbers to elements of {name}")
            self.placements.append(
                Placement(number, source - first, form.shape, form.strides, name, target, form.target_strides, offset)
            )
        if len(self.placements) > _MOST_PLACEMENTS:
            raise UnknownLayoutError(f"SGLang's loader scatters the elements of its parameter {name}")

    def _load(self, chosen: Iterable[int], values: Callable[[int, int], Tensor]) -> None:
        """Let SGLang load tensors with these values; `values` gets number and size of a tensor."""
        # Copies, because some loaders change the tensors that they get.
        self._model.load_weights(
            (self._tensors[number][0], values(number, math.prod(shape)).to(self._dtype, copy=True).view(*shape))
            for number, shape in ((number, self._tensors[number][1]) for number in chosen)
        )

    def _fill_with_nan(self, names: Any) -> None:
        for name in names:
            self._weights[name].fill_(torch.nan)


@dataclass(frozen=True, slots=True)
class Form:
    """A nest of loops over elements, the outermost first: their lengths, and the steps in tensor and parameter."""

    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    target_strides: tuple[int, ...] = ()


Part = tuple[int, int, Form]
"""Number of the first element, its index in the parameter, and the form of the part."""


def strided_parts(numbers: NDArray[Any], firsts: NDArray[np.int64]) -> list[Part]:
    """Describe a flat parameter by few strided parts of numbered tensors.

    `numbers` [n] are the numbers of its elements, or 0 for elements of no tensor. `firsts` are the numbers of the first
    elements of the tensors, ascending from 2. A part is of one tensor, because numbers of two are never consecutive.
    """
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    lengths = np.diff(starts, append=len(numbers))
    targets, lengths = starts[used := numbers[starts] > 0], lengths[used]
    sources = numbers[targets]
    rows = np.stack([np.searchsorted(firsts, sources, side="right"), lengths])
    (_, longest), kinds = np.unique(rows, axis=1, return_inverse=True)
    forms = [Form((length,), (1,), (1,)) if length > 1 else Form() for length in longest.tolist()]
    # Runs of one length at equal distances become matrices, and so on.
    while True:
        parts: list[Part] = []
        merged: list[int] = []
        known: dict[tuple[int, int, int, int], int] = {}
        merged_forms: list[Form] = []
        for start, count in _steady(sources, targets, kinds):
            kind, following = int(kinds[start]), start + (count > 1)
            step, target_step = int(sources[following] - sources[start]), int(targets[following] - targets[start])
            number = known.setdefault((kind, count, step, target_step), len(merged_forms))
            if number == len(merged_forms):
                inner = forms[kind]
                loop = Form((count, *inner.shape), (step, *inner.strides), (target_step, *inner.target_strides))
                merged_forms.append(inner if count == 1 else loop)
            merged.append(number)
            parts.append((int(sources[start]), int(targets[start]), merged_forms[number]))
        if len(parts) == len(sources):
            return parts
        sources, targets = (np.array([part[i] for part in parts], np.int64) for i in (0, 1))
        kinds, forms = np.array(merged, np.int64), merged_forms


def _steady(
    sources: NDArray[np.int64], targets: NDArray[np.int64], kinds: NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Divide parts into runs of one kind at equal distances: the first part and the number of parts of each run."""
    steps = np.stack([np.diff(sources), np.diff(targets), kinds[:-1] * 2 + (np.diff(kinds) != 0)])
    ends = np.append(np.flatnonzero((np.diff(steps) != 0).any(0)), steps.shape[1] - 1).tolist()
    # torch has no views with negative strides.
    alike = ((np.diff(kinds) == 0) & (np.diff(sources) >= 0)).tolist()
    start, position = 0, 0
    while start < len(kinds):
        while position < len(ends) and ends[position] < start:
            position += 1
        # The distance from a part to the next one belongs to a run of equal distances that ends at `ends[position]`.
        count = ends[position] - start + 2 if start < len(alike) and alike[start] else 1
        yield start, count
        start += count


def _exact_bits(dtype: torch.dtype) -> int:
    """Bits of an integer to which 1 or 2 can be added exactly."""
    return {torch.float32: 20, torch.float64: 20, torch.float16: 9}.get(dtype, 7)


def _integer(end: int) -> torch.dtype:
    """The type for integers below `end`."""
    return torch.int32 if end < 1 << 31 else torch.int64


def _mixed_integers(size: int, dtype: torch.dtype) -> Tensor:
    """[size] integers below 128 that look random."""
    integers = torch.empty(size, dtype=dtype)
    # In parts: the integers of 64 bits take more memory than the largest tensor.
    for part, start in zip(integers.split(_PART), range(0, size, _PART), strict=True):
        elements = torch.arange(start, start + len(part))
        part.copy_(elements.mul_(2654435761).bitwise_right_shift_(9).bitwise_and_(127))
    return integers
