"""Copies weights into the memory of engines on the same machine.

`process_vm_writev` copies between two processes in one system call. It reaches half the speed of a copy inside one
process and several times that of any socket, and the engine takes no part in it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from miles_async.adapters.sglang.engine_weights import machine_id
from miles_async.errors import EngineLostError
from miles_async.transports import Transport

if TYPE_CHECKING:
    from miles_async.adapters.weights.engine import EngineMemory
    from miles_async.adapters.weights.staging import Staging

HANDICAP_SECONDS = 0.010
"""If the transport saves less time than this per publish, `auto` prefers one that also works across machines, so that a
small test run exercises the code that clusters use."""
SEGMENTS_PER_CALL = 1024
"""The kernel's limit (IOV_MAX)."""

Segment = tuple[int, int, int]
"""Local address, remote address, bytes."""


class _IoVec(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class MemoryTransport(Transport):
    """Copies the weights directly into the memory of an engine on the same machine."""

    name = "memory"
    measured = True

    def __init__(self) -> None:
        self._process_vm_writev = ctypes.CDLL(None, use_errno=True).process_vm_writev
        self._process_vm_writev.restype = ctypes.c_ssize_t
        vectors = (ctypes.c_void_p, ctypes.c_ulong)
        self._process_vm_writev.argtypes = [ctypes.c_int, *vectors, *vectors, ctypes.c_ulong]

    def cost(self, seconds: float) -> float:
        return super().cost(seconds) + HANDICAP_SECONDS

    def connect(self, engine: EngineMemory) -> None:
        for rank in engine.ranks:
            if rank.machine != machine_id():
                raise EngineLostError("it is on another machine")
            if any(region.device != "cpu" for region in rank.regions.values()):
                raise EngineLostError(f"the weights of engine {engine.name} are not in main memory")

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        local = staging.buffer.data_ptr()
        size = 0
        for rank, memory in enumerate(engine.ranks):
            # All tensors at once: buckets would only add system calls.
            copies = [
                (local + source, memory.regions[parameter].address + target, length)
                for source, parameter, target, length in staging.segments(staging.plans, rank)
            ]
            for first in range(0, len(copies), SEGMENTS_PER_CALL):
                self._copy(memory.pid, copies[first : first + SEGMENTS_PER_CALL])
            size += sum(length for _, _, length in copies)
        return size

    def _copy(self, pid: int, copies: Sequence[Segment]) -> None:
        """Copy all segments. The kernel may copy only a part of them, so continue until nothing is left."""
        left = list(copies)
        while left:
            local, remote = (_IoVec * len(left))(), (_IoVec * len(left))()
            for number, (source, target, size) in enumerate(left):
                local[number], remote[number] = _IoVec(source, size), _IoVec(target, size)
            copied = self._process_vm_writev(pid, local, len(left), remote, len(left), 0)
            if copied <= 0:
                raise EngineLostError(f"its memory cannot be written: {os.strerror(ctypes.get_errno())}")
            left = _remaining(left, copied)


def _remaining(copies: Sequence[Segment], done: int) -> list[Segment]:
    """Return what is left of `copies` after their first `done` bytes."""
    for number, (source, target, size) in enumerate(copies):
        if done < size:
            return [(source + done, target + done, size - done), *copies[number + 1 :]]
        done -= size
    return []
