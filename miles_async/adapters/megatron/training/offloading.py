"""Moves models and optimizer states to host memory and back, for engines that share the GPU (`--colocate`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel, TrainedModel
from miles_async.adapters.megatron.model.host_memory import HostMemory, copy_tensors
from miles_async.adapters.megatron.training.optimizer import contents, distinct_storages, model_tensors


class Offloaded:
    """Tensors without device memory, and the copies of their contents in host memory.

    The memory is that of storages, so that tensors which share a storage, such as parameters and the buffer of the
    distributed optimizer, share it afterwards too. (Megatron's `offload_to_cpu` replaces tensors one by one, and leaves
    bfloat16 parameters on the GPU unless the optimizer is distributed.)
    """

    def __init__(self, memory: HostMemory, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copy the contents of `kept` to `memory` and free the memory of all. The contents of `dropped` will be zeros.

        Until `restore` nothing else may be copied to `memory`.
        """
        storages = distinct_storages(kept)
        copies = memory.copy(list(map(contents, storages.values())))
        self._copies = list(zip(storages.values(), copies, strict=True))
        self._dropped = [
            (storage, storage.nbytes()) for key, storage in distinct_storages(dropped).items() if key not in storages
        ]
        self.bytes = sum(storage.nbytes() for storage, _ in [*self._copies, *self._dropped])
        """Device memory that was freed."""
        for storage, _ in [*self._copies, *self._dropped]:
            storage.resize_(0)

    def restore(self) -> None:
        """Give the tensors memory again, with their contents."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes)
        copy_tensors((contents(storage), copy) for storage, copy in self._copies)
        for storage, size in self._dropped:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]  # torch does not declare it


def offload(models: Iterable[MegatronModel]) -> list[Offloaded]:
    """Free the GPU memory of these models and of their optimizers, without the gradients, which the next step clears.

    On a CPU there is nothing to free.
    """
    if on_cpu():
        return []
    torch.cuda.synchronize()
    offloaded = [_offload(model) for model in models]
    # Return the freed blocks from torch's cache to the device, where the engine's process can allocate them.
    torch.cuda.empty_cache()
    return offloaded


def _offload(model: MegatronModel) -> Offloaded:
    if not isinstance(model, TrainedModel):
        return Offloaded(model.host_memory, (parameter for chunk in model.chunks for parameter in chunk.parameters()))
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    # The state of an offloaded optimizer is in host memory already.
    on_device = (tensor for tensor in model_tensors(model) if _is_on(model.device, tensor))
    return Offloaded(model.host_memory, on_device, [buffer.grad_data for buffer in buffers])


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    return tensor.device == device
