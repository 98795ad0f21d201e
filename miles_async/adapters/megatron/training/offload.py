"""A learner that leaves its GPU to the engines for a while (`--colocate`): its state waits in the host's memory.

Nothing on a CPU machine, where both live in the same memory anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


def offload(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Parameters and optimizer state go to the host; gradients are dropped, as the next step clears them anyway."""
    if not torch.cuda.is_available():
        return
    for buffer in (buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        buffer.offload_to_cpu()
    optimizer.offload_to_cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def onload(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """The other way round."""
    if not torch.cuda.is_available():
        return
    for buffer in (buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        buffer.reload_from_cpu()
    optimizer.restore_from_cpu()
    torch.cuda.synchronize()
