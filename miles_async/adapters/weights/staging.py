"""The staging buffer: one version of the learner's weights, in the layout and dtypes of the engines.

Each weight source (learner rank) stages only the tensors that it sends. All staging buffers together are one copy of
the model, for any number of engines. Every transport reads from the staging buffer, so a version can be sent again by
another transport while training goes on.

The buffer is in main memory, or on the learner's GPU if all transports in use read it there (`Transport.device`).
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from miles_async.adapters.sglang.engine_weights import SAMPLE_BYTES, checksum_of
from miles_async.adapters.weights.engine import Window
from miles_async.adapters.weights.layout import Piece, TensorDescription, TensorPlan
from miles_async.errors import FatalError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and full (unsharded) tensors."""
Segment = tuple[int, str, int, int]
"""A one-sided write: the first byte in the staging buffer, the parameter, the first byte in it, and the bytes."""


def describe(named_tensors: NamedTensors) -> list[TensorDescription]:
    """Name, shape and dtype of each tensor."""
    return [(name, tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in named_tensors]


class Staging:
    """Memory for the tensors of `plans`."""

    def __init__(self, plans: Sequence[TensorPlan]) -> None:
        dtype_of: dict[str, torch.dtype] = {plan.name: getattr(torch, plan.dtype) for plan in plans}
        blocks: dict[str, int] = {}
        for plan in plans:
            blocks.setdefault(plan.block, len(blocks))
        # Sorted by element size, largest first, every tensor is aligned to its dtype without gaps.
        self.plans = sorted(plans, key=lambda plan: (-dtype_of[plan.name].itemsize, blocks[plan.block]))
        self._by_name = {plan.name: plan for plan in self.plans}
        self.version: int | None = None
        """The staged version; None while the buffer is being filled."""
        self.fill_count = 0
        """Number of fills. Identifies the contents: a version number may return in another run on the same engines."""
        self._offsets: dict[str, int] = {}
        size = 0
        for plan in self.plans:
            self._offsets[plan.name] = size
            size += plan.numel * dtype_of[plan.name].itemsize
        self._dtype_of = dtype_of
        self.buffer = torch.zeros(size, dtype=torch.uint8)
        self._views = self._views_of(self.buffer)

    def move(self, device: str) -> None:
        """Move the buffer to `cpu` or `cuda`, unless it is there. Sends that run meanwhile may read either of the two.

        On a GPU, the memory shares no segment of torch's allocator with tensors of the learner. A segment is returned
        to the device as a whole, for an engine that shares the device.
        """
        if self.buffer.device.type != device:
            moved = empty_bytes(len(self.buffer), device).copy_(self.buffer)
            self.buffer, self._views = moved, self._views_of(moved)

    def _views_of(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: buffer[offset : offset + self._by_name[name].numel * self._dtype_of[name].itemsize].view(
                self._dtype_of[name]
            )
            for name, offset in self._offsets.items()
        }

    @torch.no_grad()
    def fill(self, version: int, named_tensors: NamedTensors) -> None:
        """Copy the planned tensors into the buffer, in any order; other tensors are ignored.

        Raises FatalError if a planned tensor is missing or has another shape.
        """
        # A fill that fails halfway must not leave a buffer that looks like a staged version.
        self.version = None
        self.fill_count += 1
        missing = set(self._by_name)
        for name, tensor in named_tensors:
            if name not in self._by_name:
                continue  # another weight source sends it
            plan = self._by_name[name]
            if tuple(tensor.shape) != plan.shape:
                raise FatalError(f"the learner's {name} changed its shape to {tuple(tensor.shape)}")
            if plan.pieces:
                for piece, part, staged in _pieces(plan, tensor, self._views[name]):
                    staged.copy_(part)
                    if piece.offset:
                        # SGLang's loader adds the offset in the engine's dtype, too.
                        staged.add_(piece.offset)
            else:
                self._views[name].view(tensor.shape).copy_(tensor)
            missing.discard(name)
        if missing:
            raise FatalError(f"the learner no longer exports {min(missing)}")
        if self.buffer.is_cuda:
            torch.cuda.current_stream().synchronize()  # transports read the buffer in other streams
        self.version = version

    def offset(self, name: str) -> int:
        """Return the first byte of a tensor in the buffer."""
        return self._offsets[name]

    def element_size(self, name: str) -> int:
        """Return the bytes per element of a tensor."""
        return self._views[name].itemsize

    def tensor(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor as a checkpoint contains it, for SGLang's loader: `out`, if that is given.

        Otherwise the result is a view of staged memory, unless the tensor is staged in pieces.
        """
        plan = self._by_name[name]
        values = self._views[name]
        if not plan.pieces:
            staged = values.view(plan.shape)
            return staged if out is None else out.copy_(staged)
        # Elements that no engine holds stay 0.
        whole = torch.zeros(plan.shape, dtype=values.dtype, device=values.device) if out is None else out.zero_()
        for piece, part, staged in _pieces(plan, whole, values):
            if not piece.offset:
                part.copy_(staged)
        return whole

    def buckets(self, size: int) -> Iterator[list[TensorPlan]]:
        """Yield the tensors in buffer order, in buckets of at most `size` bytes; a larger block is a bucket alone."""
        bucket: list[TensorPlan] = []
        filled = 0
        for _, plans in itertools.groupby(self.plans, key=lambda plan: plan.block):
            block = list(plans)
            block_size = sum(plan.numel * self.element_size(plan.name) for plan in block)
            if bucket and filled + block_size > size:
                yield bucket
                bucket, filled = [], 0
            bucket += block
            filled += block_size
        if bucket:
            yield bucket

    def segments(self, bucket: Sequence[TensorPlan], rank: int) -> Iterator[Segment]:
        """Yield the one-sided writes that bring a bucket to an engine rank."""
        for plan in bucket:
            width, base = self.element_size(plan.name), self.offset(plan.name)
            for copy in plan.copies:
                if copy.rank == rank and copy.numel:
                    yield base + copy.source * width, copy.parameter, copy.target * width, copy.numel * width

    def sizes(self, bucket: Sequence[TensorPlan]) -> list[int]:
        """The bytes of each tensor of a bucket, as `tensor` returns it."""
        return [math.prod(plan.shape) * self.element_size(plan.name) for plan in bucket]

    def flat(self, bucket: Sequence[TensorPlan], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the bytes of the tensors of a bucket, as `tensor` returns them, without gaps: at the start of `out`.

        If that is not given, the result is a view of staged memory if possible.
        """
        sizes = self.sizes(bucket)
        if all(not plan.pieces for plan in bucket):
            # Neighbours in a bucket are neighbours in the buffer.
            first = self._offsets[bucket[0].name]
            staged = self.buffer[first : first + sum(sizes)]
            return staged if out is None else out[: len(staged)].copy_(staged)
        if out is None:
            out = torch.empty(sum(sizes), dtype=torch.uint8, device=self.buffer.device)
        flat = out[: sum(sizes)]
        for plan, part in zip(bucket, flat.split(sizes), strict=True):
            self.tensor(plan.name, part.view(self._dtype_of[plan.name]).view(plan.shape))
        return flat

    def checksums(self, ranks: int, *, verify_all: bool) -> tuple[list[list[Window]], list[list[int]]]:
        """Choose the bytes of an engine to verify; return the windows and the CRC-32 that each must have, by rank.

        Every copy has one window: all of its bytes with `verify_all`, else `SAMPLE_BYTES` at a random offset.
        """
        windows: list[list[Window]] = [[] for _ in range(ranks)]
        expected: list[list[int]] = [[] for _ in range(ranks)]
        memory = self.buffer
        for plan in self.plans:
            width, base = self.element_size(plan.name), self._offsets[plan.name]
            for copy in plan.copies:
                size, skipped = copy.numel * width, 0
                if not verify_all and size > SAMPLE_BYTES:
                    skipped = random.randrange(size - SAMPLE_BYTES + 1)
                    size = SAMPLE_BYTES
                start = base + copy.source * width + skipped
                windows[copy.rank].append((copy.parameter, copy.target * width + skipped, size))
                expected[copy.rank].append(zlib.crc32(memory[start : start + size].cpu().numpy().data))
        return windows, expected

    def received(self, *, verify_all: bool) -> dict[str, int]:
        """The CRC-32 of each tensor that SGLang's loader receives; see `engine_weights.checksum_of`."""
        return {plan.name: checksum_of(self.tensor(plan.name), whole=verify_all) for plan in self.plans}


def _pieces(
    plan: TensorPlan, whole: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
    """Yield each piece with its view of the whole tensor and its view of the staged `values`."""
    flat = whole.contiguous().view(-1)
    for piece, staged in zip(plan.pieces, values.split([piece.numel for piece in plan.pieces]), strict=True):
        first = flat.storage_offset() + piece.source
        yield piece, flat.as_strided(piece.shape, piece.strides, first), staged.view(piece.shape)


def empty_bytes(size: int, device: str) -> torch.Tensor:
    """Memory on `cpu` or `cuda`; see `Staging.move`."""
    if device == "cpu":
        return torch.empty(size, dtype=torch.uint8)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        return torch.empty(size, dtype=torch.uint8, device=device)


def plans_of_source(plans: Sequence[TensorPlan], source: int, sources: int) -> list[TensorPlan]:
    """Return the tensors that one of several weight sources sends, in the order of `plans`.

    A source sends whole blocks. The assignment is greedy, largest block first, so that all sources send about the same
    number of elements. It depends on `plans` alone: every source computes the same assignment without communication.
    """
    sizes: Counter[str] = Counter()
    for plan in plans:
        sizes[plan.block] += plan.numel
    loads = [0] * sources
    chosen = set()
    for block in sorted(sizes, key=lambda block: (-sizes[block], block)):
        least = loads.index(min(loads))
        loads[least] += sizes[block]
        if least == source:
            chosen.add(block)
    return [plan for plan in plans if plan.block in chosen]
