"""The process groups of the learner's ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import on_cpu
from miles_async.config.schema import Learner

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def join(*, rank: int, world_size: int, address: str, port: int, learner: Learner) -> torch.device:
    """Meet the other ranks, form the groups, and return this rank's device. Blocks until all ranks came."""
    device = torch.device("cpu") if on_cpu() else torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "gloo" if on_cpu() else "nccl",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=learner.tensor_model_parallel_size,
        pipeline_model_parallel_size=learner.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=learner.virtual_pipeline_model_parallel_size,
        context_parallel_size=learner.context_parallel_size,
        expert_model_parallel_size=learner.expert_model_parallel_size,
        expert_tensor_parallel_size=learner.expert_tensor_parallel_size,
    )
    torch.manual_seed(learner.seed)
    if on_cpu():
        # Sequence parallelism asks for random states of CUDA's; nothing is drawn from them.
        initialize_rng_tracker(inference_rng_tracker=True)
    else:
        model_parallel_cuda_manual_seed(learner.seed)
    return device


def broadcast_from_last_stage(tensor: Tensor) -> Tensor:
    """What the last stage of this rank's pipeline holds; the others give a tensor of the same shape to fill."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def leave() -> None:
    """Dissolve the groups, so that this process may form others."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
