"""Moves models and optimizer states to host memory and back, for engines that share the GPU (`--colocate`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel, TrainedModel
from miles_async.adapters.megatron.training.optimizer import model_tensors


class Offloaded:
    """Tensors without device memory, and the copies of their contents in host memory.

    The memory is that of storages, so that tensors which share a storage, such as parameters and the buffer of the
    distributed optimizer, share it afterwards too. (Megatron's `offload_to_cpu` replaces tensors one by one, and leaves
    bfloat16 parameters on the GPU unless the optimizer is distributed.)
    """

    def __init__(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copy the contents of `kept` and free the memory of all. The contents of `dropped` will be zeros."""
        storages = _storages(kept)
        self._copies = [(storage, UntypedStorage(storage.nbytes()).copy_(storage)) for storage in storages.values()]
        self._dropped = [
            (storage, storage.nbytes()) for key, storage in _storages(dropped).items() if key not in storages
        ]
        self.bytes = sum(storage.nbytes() for storage, _ in [*self._copies, *self._dropped])
        """Device memory that was freed."""
        for storage, _ in [*self._copies, *self._dropped]:
            storage.resize_(0)

    def restore(self) -> None:
        """Give the tensors memory again, with their contents."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for storage, size in self._dropped:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]  # torch does not declare it


def offload(models: Iterable[MegatronModel]) -> Offloaded | None:
    """Free the GPU memory of these models and of their optimizers, without the gradients, which the next step clears.

    Returns None on a CPU, where there is nothing to free.
    """
    if on_cpu():
        return None
    kept: list[Tensor] = []
    gradients: list[Tensor] = []
    for model in models:
        if isinstance(model, TrainedModel):
            kept += model_tensors(model)
            buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            gradients += [buffer.grad_data for buffer in buffers]
        else:
            kept += [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    torch.cuda.synchronize()
    offloaded = Offloaded(kept, gradients)
    # Return the freed blocks from torch's cache to the device, where the engine's process can allocate them.
    torch.cuda.empty_cache()
    return offloaded


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The distinct storages of these tensors, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
