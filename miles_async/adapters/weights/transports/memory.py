"""Straight into the engine's memory, where engine and learner share a machine and the weights lie in its main memory.

One system call copies between two processes (`process_vm_writev`), at half the speed of a plain copy and several times
that of any socket; the engine takes no part.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from miles_async.adapters.sglang.engine_weights import machine
from miles_async.adapters.weights.engine import Engine
from miles_async.adapters.weights.staging import Staging
from miles_async.adapters.weights.transports.transport import segments
from miles_async.errors import EngineLostError

AT_ONCE = 1024
"""Segments per call; the kernel takes no more (IOV_MAX)."""

Segment = tuple[int, int, int]
"""Address here, address there, bytes."""


class _Vector(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class MemoryTransport:
    """Implements `Transport`."""

    def __init__(self) -> None:
        self._write = ctypes.CDLL(None, use_errno=True).process_vm_writev
        self._write.restype = ctypes.c_ssize_t
        pieces = (ctypes.c_void_p, ctypes.c_ulong)
        self._write.argtypes = [ctypes.c_int, *pieces, *pieces, ctypes.c_ulong]

    def connect(self, engine: Engine) -> None:
        for rank in engine.ranks:
            if rank.machine != machine():
                raise EngineLostError("it is on another machine")
            if any(region.device != "cpu" for region in rank.regions.values()):
                raise EngineLostError(f"the weights of engine {engine.name} are not in main memory")

    def forget(self, name: str) -> None: ...

    def stage(self, staging: Staging) -> None: ...

    def write(self, staging: Staging, engine: Engine) -> int:
        here = staging.buffer.data_ptr()
        size = 0
        for rank, memory in enumerate(engine.ranks):
            mine = [
                (here + source, memory.regions[parameter].address + target, length)
                for source, parameter, target, length in segments(staging, staging.placements, rank)
            ]
            for first in range(0, len(mine), AT_ONCE):
                self._copy(memory.pid, mine[first : first + AT_ONCE])
            size += sum(length for _, _, length in mine)
        return size

    def close(self) -> None: ...

    def _copy(self, pid: int, copies: Sequence[Segment]) -> None:
        """The kernel may stop short; go on where it did."""
        left = list(copies)
        while left:
            here, there = (_Vector * len(left))(), (_Vector * len(left))()
            for number, (source, target, size) in enumerate(left):
                here[number], there[number] = _Vector(source, size), _Vector(target, size)
            copied = self._write(pid, here, len(left), there, len(left), 0)
            if copied <= 0:
                raise EngineLostError(f"its memory cannot be written: {os.strerror(ctypes.get_errno())}")
            left = _rest(left, copied)


def _rest(copies: Sequence[Segment], done: int) -> list[Segment]:
    """What remains of `copies` after their first `done` bytes."""
    for number, (source, target, size) in enumerate(copies):
        if done < size:
            return [(source + done, target + done, size - done), *copies[number + 1 :]]
        done -= size
    return []
