"""Lets engines on the learner's node read weights from the learner's memory: by CUDA IPC on GPUs, else shared memory.

A source copies one bucket after another into a window, and SGLang's `/update_weights_from_tensor` loads it. The request
has only a description of the window for each rank of the engine. On GPUs the weights are staged on the learner's GPU,
so nothing passes through main memory.

The window stays the same for all buckets, versions and engines. torch would count the readers of each new piece of
memory and keep it until all have released it, forever if one of them has died.
"""

from __future__ import annotations

import os
import pickle
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from miles_async.adapters.sglang.engine_weights import machine_id
from miles_async.errors import EngineLostError
from miles_async.transports import LOAD_ONLY, SourceOptions, Transport

if TYPE_CHECKING:
    import torch

    from miles_async.adapters.weights.engine import EngineMemory, RankMemory
    from miles_async.adapters.weights.layout import TensorPlan
    from miles_async.adapters.weights.staging import Staging


class IPCTransport(Transport):
    """Lets engines on the same node read the weights by CUDA IPC, or on a CPU through shared memory.

    The window has the size of a bucket, and is in the memory of the learner's device.
    """

    name = "ipc"
    # The default with --colocate.
    optional = True
    uses_loader = True

    def open(self, source: SourceOptions) -> None:
        import torch

        super().open(source)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._window: Window | None = None
        self._turn = Lock()
        """Held while an engine reads the window."""

    def connect(self, engine: EngineMemory) -> None:
        for rank in engine.ranks:
            if rank.machine != machine_id():
                raise EngineLostError(
                    "it is on another node than a learner rank, or in another container, and ipc needs both on one "
                    "node; use --weight-transfer p2p or broadcast"
                )
            if rank.device.partition(":")[0] != self.device:
                raise EngineLostError(f"its weights are on {rank.device}, and the learner's on {self.device}")

    def prepare(self, staging: Staging) -> None:
        """Allocate the window while the learner has the device."""
        size = max((sum(staging.sizes(bucket)) for bucket in staging.buckets(self.source.bucket)), default=0)
        if size and (self._window is None or self._window.bytes.numel() < size):
            with self._turn:
                self._window = window_on_gpu(size) if self.device == "cuda" else window_in_main_memory(size)

    def send(self, staging: Staging, engine: EngineMemory) -> int:
        return sum(self._send_bucket(staging, bucket, engine) for bucket in staging.buckets(self.source.bucket))

    def close(self) -> None:
        self._window = None

    def _send_bucket(self, staging: Staging, bucket: Sequence[TensorPlan], engine: EngineMemory) -> int:
        """Return the bytes of a bucket when all ranks of the engine have loaded it."""
        import torch

        from miles_async.adapters.weights.engine import call_engine

        assert self._window is not None, "prepare() comes first"
        with self._turn:
            size = staging.flat(bucket, self._window.bytes).numel()
            if self.device == "cuda":
                torch.cuda.current_stream().synchronize()
            metadata = list(_metadata(staging, bucket))
            request = {
                "serialized_named_tensors": [
                    serialized({"flattened_tensor": self._window.seen_by(rank, size), "metadata": metadata})
                    for rank in engine.ranks
                ],
                "load_format": "flattened_bucket",
                **LOAD_ONLY,
            }
            call_engine(engine.info, "/update_weights_from_tensor", request, timeout=self.source.timeout)
        return size


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Window:
    """Memory of this process that engines read."""

    bytes: torch.Tensor
    seen_by: Callable[[RankMemory, int], Call]
    """The tensor with the first bytes of the window in the process of an engine's rank."""


class Call:
    """In a pickle, a call of a function of torch that is made when the pickle is read."""

    def __init__(self, function: Callable[..., torch.Tensor], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return self._call


def window_in_main_memory(size: int) -> Window:
    """A file without a name, which no process leaves behind, however it ends."""
    import torch

    descriptor = os.memfd_create("weights")
    os.truncate(descriptor, size)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def seen_by(rank: RankMemory, size: int) -> Call:
        return Call(partial(torch.from_file, path, shared=False, size=size, dtype=torch.uint8))

    window = Window(torch.from_file(path, shared=True, size=size, dtype=torch.uint8), seen_by)
    weakref.finalize(window, os.close, descriptor)
    return window


def window_on_gpu(size: int) -> Window:
    """Memory on this process's GPU, which is shared once: torch cannot take back what it has shared before."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from miles_async.adapters.weights.staging import empty_bytes

    data = empty_bytes(size, "cuda")
    _, handle, length, offset, counter, position, event, _ = data.untyped_storage()._share_cuda_()

    def seen_by(rank: RankMemory, size: int) -> Call:
        shape = torch.Size([size]), (1,), data.storage_offset()
        # The rank's own GPU: CUDA also opens memory of GPUs that the process does not see.
        device = torch.device(rank.device).index
        memory = device, handle, length, offset
        # The last argument: the rank need not wait for this GPU, because `_send_bucket` has waited.
        counted = counter, position, event, False
        return Call(
            rebuild_cuda_tensor,
            torch.Tensor,
            *shape,
            torch.storage.TypedStorage,
            torch.uint8,
            *memory,
            False,
            *counted,
        )

    return Window(data, seen_by)


def _metadata(staging: Staging, bucket: Sequence[TensorPlan]) -> Iterator[SimpleNamespace]:
    """What SGLang's `FlattenedTensorMetadata` has of each tensor."""
    import torch

    end = 0
    for plan, size in zip(bucket, staging.sizes(bucket), strict=True):
        start, end = end, end + size
        yield SimpleNamespace(
            name=plan.name,
            shape=plan.shape,
            dtype=getattr(torch, plan.dtype),
            start_idx=start,
            end_idx=end,
            numel=size,
        )


def serialized(bucket: dict[str, Any]) -> str:
    return b64encode(pickle.dumps(bucket)).decode()
