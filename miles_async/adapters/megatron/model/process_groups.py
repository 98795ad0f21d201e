"""Process groups of the learner's ranks."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.adapters.system.listeners import confined_listeners, interface_variables, local_address
from miles_async.config.schema import Learner

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def create_process_groups(*, rank: int, world_size: int, address: str, port: int, learner: Learner) -> torch.device:
    """Connect to the other ranks, create Megatron's process groups and return this rank's device.

    `address` and `port` belong to rank 0. Blocks until all ranks have called this function.
    """
    # Reference cycles keep the destroyed groups of an earlier learner alive, such as that of a warm start. Each of
    # gloo's groups has threads that wake up every 10 ms.
    gc.collect()
    os.environ |= interface_variables(local_address(address))
    device = torch.device("cpu") if on_cpu() else torch.device("cuda", torch.cuda.current_device())
    with confined_listeners(local_address(address)):
        dist.init_process_group(
            "gloo" if on_cpu() else "nccl",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
    parallel_state.initialize_model_parallel(**group_sizes(learner))
    torch.manual_seed(learner.seed)
    if on_cpu():
        # Sequence parallelism asks for CUDA random states by name. No random number is drawn from this tracker.
        initialize_rng_tracker(inference_rng_tracker=True)
    else:
        model_parallel_cuda_manual_seed(learner.seed)
    return device


def group_sizes(learner: Learner) -> dict[str, int | None]:
    """The sizes of Megatron's process groups, as arguments of `initialize_model_parallel`."""
    return {
        "tensor_model_parallel_size": learner.tensor_model_parallel_size,
        "pipeline_model_parallel_size": learner.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": learner.virtual_pipeline_model_parallel_size,
        "context_parallel_size": learner.context_parallel_size,
        "expert_model_parallel_size": learner.expert_model_parallel_size,
        "expert_tensor_parallel_size": learner.expert_tensor_parallel_size,
    }


def broadcast_from_last_stage(tensor: Tensor) -> Tensor:
    """Send a tensor from the last pipeline stage to the other stages, which pass one of the same shape to be filled.

    Only the last stage computes logits, so only it knows losses and log-probabilities.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def gather_over_data_parallel(values: Tensor) -> Tensor:
    """Concatenate the [n] values of all data-parallel ranks, whose lengths may differ."""
    return torch.cat(_gather(values, parallel_state.get_data_parallel_group()))


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, or of all ranks, in the order of the ranks.

    `value` is made of what JSON has and of dataclasses, which become dictionaries. The functions of torch.distributed
    for objects send pickles, and unpickling would run code of everyone who can connect.
    """
    group = dist.distributed_c10d._get_default_group() if group is None else group
    device = "cpu" if dist.get_backend(group) == "gloo" else torch.cuda.current_device()
    encoded = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8).to(device)
    return [msgspec.json.decode(part.cpu().numpy().tobytes()) for part in _gather(encoded, group)]


def add_over_data_parallel(values: Mapping[str, float]) -> dict[str, float]:
    """Sums by name over the data-parallel ranks of the last pipeline stage, on all ranks. Other stages pass no values.

    A rank may lack some of the names.
    """
    totals: dict[str, float] = {}
    for part in gather_json(values, parallel_state.get_data_parallel_group()):
        for name, value in part.items():
            # JSON has no number for what is not finite.
            totals[name] = totals.get(name, 0.0) + (math.nan if value is None else value)
    stages: list[dict[str, float]] = gather_json(totals, parallel_state.get_pipeline_model_parallel_group())
    return {name: math.nan if value is None else value for name, value in stages[-1].items()}


def _gather(values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the [n] values of each rank; n may differ."""
    # Collectives need tensors of one length on all ranks.
    counts = [int(length) for length in all_gather(torch.tensor([len(values)], device=values.device), group)]
    padded = values.new_zeros(max(counts))
    padded[: len(values)] = values
    return [row[:count] for row, count in zip(all_gather(padded, group), counts, strict=True)]


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape."""
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def destroy_process_groups() -> None:
    """Leave all groups, so that this process can create others."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
