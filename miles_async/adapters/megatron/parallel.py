"""The process groups of the learner's ranks."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from miles_async.adapters.megatron.cpu import on_cpu

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def join(*, rank: int, world_size: int, address: str, port: int, tensor_parallel: int, seed: int) -> torch.device:
    """Meet the other ranks, form the groups, and return this rank's device. Blocks until all ranks came."""
    device = torch.device("cpu") if on_cpu() else torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "gloo" if on_cpu() else "nccl",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(seed)
    if not on_cpu():
        model_parallel_cuda_manual_seed(seed)
    return device


def leave() -> None:
    """Dissolve the groups, so that this process may form others."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def free_port() -> int:
    """A port on loopback where the ranks may meet; nothing holds it until rank 0 listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
