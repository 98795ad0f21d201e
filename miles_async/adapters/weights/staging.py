"""The learner's weights set aside as one version, in the bytes that the engines take.

Every source rank keeps its share of the tensors and no more: all shares together are one copy of the model, whatever
the number of engines. Every way reads from here, so a version can still be sent another way while training goes on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from miles_async.adapters.weights.engine import Window
from miles_async.adapters.weights.layout import Placement
from miles_async.errors import FatalError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and full (unsharded) tensors."""
SAMPLE_BYTES = 4096
"""Compared of each copy after a write, unless everything is."""


class Staging:
    """Memory for the tensors of `placements` in the dtypes of the engine's parameters, `dtypes`."""

    def __init__(self, placements: Sequence[Placement], dtypes: Mapping[str, str]) -> None:
        of: dict[str, torch.dtype] = {
            placement.name: getattr(torch, dtypes[placement.copies[0].parameter]) for placement in placements
        }
        # The widest first: each then starts where its dtype may start, with no gap before it.
        self.placements = sorted(placements, key=lambda placement: -of[placement.name].itemsize)
        self._by_name = {placement.name: placement for placement in self.placements}
        self.version: int | None = None
        """What is staged here; None while it is being filled."""
        self.fills = 0
        """How often it was filled: a version may come back, in another run on the same engines."""
        self._starts: dict[str, int] = {}
        size = 0
        for placement in self.placements:
            self._starts[placement.name] = size
            size += placement.numel * of[placement.name].itemsize
        self.buffer = torch.zeros(size, dtype=torch.uint8)
        self._views = {
            name: self.buffer[start : start + self._by_name[name].numel * of[name].itemsize].view(of[name])
            for name, start in self._starts.items()
        }

    @torch.no_grad()
    def fill(self, version: int, named_tensors: NamedTensors) -> None:
        """Copy this share's tensors in, in whatever order they come. Raises Fatal when one did not."""
        self.version = None
        self.fills += 1
        missing = set(self._by_name)
        for name, tensor in named_tensors:
            if name not in self._by_name:
                continue  # another source rank's
            columns = self._by_name[name].columns
            if tuple(tensor.shape) != self._by_name[name].shape:
                raise FatalError(f"the learner's {name} changed its shape to {tuple(tensor.shape)}")
            if columns == 1:
                self._views[name].view(tensor.shape).copy_(tensor)
            else:
                for part, columns_of_it in zip(
                    self._views[name].chunk(columns), tensor.chunk(columns, dim=1), strict=True
                ):
                    part.view(columns_of_it.shape).copy_(columns_of_it)
            missing.discard(name)
        if missing:
            raise FatalError(f"the learner no longer exports {min(missing)}")
        self.version = version

    def start(self, name: str) -> int:
        """Of a tensor in the buffer, in bytes."""
        return self._starts[name]

    def width(self, name: str) -> int:
        """Bytes per element."""
        return self._views[name].itemsize

    def dtype(self, name: str) -> torch.dtype:
        return self._views[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        """As Hugging Face has it; a view where it is staged so."""
        placement = self._by_name[name]
        if placement.columns == 1:
            return self._views[name].view(placement.shape)
        rows = placement.shape[0]
        return torch.cat([part.view(rows, -1) for part in self._views[name].chunk(placement.columns)], dim=1)

    def buckets(self, size: int) -> Iterator[list[Placement]]:
        """The tensors in the order in which they lie, so many at a time that they have `size` bytes together.

        One that is larger is alone.
        """
        bucket: list[Placement] = []
        filled = 0
        for placement in self.placements:
            its_size = placement.numel * self.width(placement.name)
            if bucket and filled + its_size > size:
                yield bucket
                bucket, filled = [], 0
            bucket.append(placement)
            filled += its_size
        if bucket:
            yield bucket

    def flat(self, bucket: Sequence[Placement]) -> torch.Tensor:
        """The bytes of a bucket as Hugging Face has them; a view where they are staged so."""
        if all(placement.columns == 1 for placement in bucket):
            last = bucket[-1].name
            return self.buffer[self._starts[bucket[0].name] : self._starts[last] + bucket[-1].numel * self.width(last)]
        return torch.cat([self.tensor(placement.name).flatten().view(torch.uint8) for placement in bucket])

    def windows(self, ranks: int, *, everything: bool) -> tuple[list[list[Window]], list[list[int]]]:
        """For each engine rank, parts of its memory and the CRC-32 that each must have.

        All of every copy, or `SAMPLE_BYTES` of each, at another place each time.
        """
        windows: list[list[Window]] = [[] for _ in range(ranks)]
        expected: list[list[int]] = [[] for _ in range(ranks)]
        memory = self.buffer.numpy()
        for placement in self.placements:
            width, base = self.width(placement.name), self._starts[placement.name]
            for copy in placement.copies:
                size, offset = copy.numel * width, 0
                if not everything and size > SAMPLE_BYTES:
                    offset = random.randrange(size - SAMPLE_BYTES + 1)
                    size = SAMPLE_BYTES
                here = base + copy.source * width + offset
                windows[copy.rank].append((copy.parameter, copy.target * width + offset, size))
                expected[copy.rank].append(zlib.crc32(memory[here : here + size].data))
        return windows, expected


def share(placements: Sequence[Placement], source: int, sources: int) -> list[Placement]:
    """The tensors that one of several source ranks sends: about equally many elements each, the same on every rank."""
    loads = [0] * sources
    mine = []
    for placement in sorted(placements, key=lambda placement: (-placement.numel, placement.name)):
        least = loads.index(min(loads))
        loads[least] += placement.numel
        if least == source:
            mine.append(placement)
    order = {placement.name: number for number, placement in enumerate(placements)}
    return sorted(mine, key=lambda placement: order[placement.name])
