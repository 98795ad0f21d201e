"""Copies between the memory of the host and a GPU. On a CPU tensors are copied as torch does it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import on_cpu

_ALIGNMENT = 64
"""Bytes."""
_PORTABLE = 1
"""Flag of `cudaHostRegister`: all GPUs of the process can use the memory."""

log = structlog.get_logger(__name__)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The entries of `array` on `device`. A GPU gets them from pinned memory, so that the host need not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copy_tensors(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first one, and wait once, after the last of them."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    if not on_cpu():
        torch.cuda.current_stream().synchronize()


class HostMemory:
    """Host memory for copies of a GPU's tensors, which is kept for the next copies. On a CPU nothing is kept.

    Fresh memory is several times slower than a copy, because the kernel provides it page by page. Memory that is kept
    can also be pinned, and a GPU writes into it without a detour.
    """

    def __init__(self) -> None:
        self._buffer: NDArray[np.uint8] = np.empty(0, np.uint8)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the host. The copies are valid until the next call."""
        tensors = [tensor.detach() for tensor in tensors]
        if on_cpu():
            return [tensor.clone() for tensor in tensors]
        ends = list(accumulate((tensor.nbytes + -tensor.nbytes % _ALIGNMENT for tensor in tensors), initial=0))
        if ends[-1] > len(self._buffer):
            self._buffer = np.empty(0, np.uint8)  # frees the old one first
            self._buffer = _pinned(ends[-1])
        copies = [self._part(start, tensor) for start, tensor in zip(ends, tensors, strict=False)]
        copy_tensors(zip(copies, tensors, strict=True))
        return copies

    def _part(self, start: int, like: Tensor) -> Tensor:
        """A tensor in the buffer whose storage ends with it, so that `torch.save` writes nothing else."""
        if not like.nbytes:
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(self._buffer[start : start + like.nbytes], dtype=like.dtype).view(like.shape)


def _pinned(size: int) -> NDArray[np.uint8]:
    """Memory that is pinned if the system allows it. torch's own pinned memory would have the next power of two."""
    buffer = np.empty(size, np.uint8)
    address, cudart = buffer.ctypes.data, torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if not error:
        weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False
        return buffer
    log.warning("host memory cannot be pinned, so copies from the GPU are slower", gibibytes=size / 2**30, error=error)
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # raises the error, which torch would otherwise find after another kernel
    return buffer
