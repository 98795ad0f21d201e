"""Converts weights between Megatron's shards and whole tensors with Hugging Face names, in every parallel layout.

mbridge knows the names and how one tensor is merged and split. This module decides which rank holds which part, in the
same way for layers with and without Transformer Engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mbridge.core import Bridge
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state
from torch import Tensor

_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc(\d)\.weight(\d*)$")
"""Matches an expert's weight: one module per expert, or numbered weights of a module for all experts of a rank."""


@torch.no_grad()
def load_weights(bridge: Bridge, chunks: Sequence[torch.nn.Module], folder: str) -> None:
    """Load this rank's part of a Hugging Face checkpoint into `chunks`; each rank reads only the tensors it needs."""
    files = bridge._get_safetensor_io(folder)
    for chunk in chunks:
        tensors = unwrap_model(chunk).state_dict()
        for local, name in _global_names(bridge, chunk, first_expert=_first_expert(bridge)).items():
            # One Megatron tensor may merge several of Hugging Face's, such as queries, keys and values.
            hf_names = bridge._weight_name_mapping_mcore_to_hf(name)
            hf_tensors = files.load_some_hf_weight(hf_names)
            whole = bridge._weight_to_mcore_format(name, [hf_tensors[hf_name] for hf_name in hf_names])
            group = _tensor_parallel_group(name)
            parts = bridge._weight_split_across_tp(name, whole, tensors[local], group.size())
            tensors[local].copy_(parts[group.rank()])


@dataclass(frozen=True, slots=True)
class _Shard:
    """Description of a tensor on one pipeline stage, which the ranks of all stages need to receive and convert it."""

    local: str
    """Name in its chunk."""
    name: str
    """Name in the whole model, except that experts are numbered from 0 on each rank."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: bool
    """Whether tensor-parallel ranks hold different parts; otherwise they all hold the same."""
    axis: int
    """Dimension along which the tensor is split."""


@torch.no_grad()
def export_weights(bridge: Bridge, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight once, whole and with its Hugging Face name, on every rank.

    This is a collective operation: all ranks must iterate to the end. Only one whole tensor exists at a time. Tensors
    may be views of parameters, so copy those that must outlast the next optimizer step.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    held = {(i, name): tensor for i, chunk in enumerate(chunks) for name, tensor in _named_tensors(chunk)}
    # Collectives must be entered by all ranks in one order. So every rank first learns the tensors of all stages, and
    # then all ranks go through the stages in order.
    stages: list[list[tuple[int, _Shard]]] = [[] for _ in range(pipeline.size())]
    dist.all_gather_object(stages, _describe_shards(bridge, chunks), group=pipeline)
    exported: set[str] = set()
    for stage, shards in enumerate(stages):
        for i, shard in shards:
            tensor = held[i, shard.local] if stage == pipeline.rank() else None
            for name, whole in _to_hf(bridge, shard, _broadcast_from_stage(tensor, shard, stage)):
                # The first and the last stage both hold tied embeddings.
                if name not in exported:
                    exported.add(name)
                    yield name, whole


def _describe_shards(bridge: Bridge, chunks: Sequence[torch.nn.Module]) -> list[tuple[int, _Shard]]:
    """(number of the chunk, description) of every tensor that this rank holds."""
    result = []
    for i, chunk in enumerate(chunks):
        names = _global_names(bridge, chunk, first_expert=0)
        for local, tensor in _named_tensors(chunk):
            is_expert = _EXPERT.search(local) is not None
            # Megatron sets these attributes on parameters that are split. It does not set them on all experts' weights.
            attributes = vars(tensor)
            is_parallel = is_expert or attributes.get("tensor_model_parallel", False)
            split = _tensor_parallel_group(names[local]).size() > 1 and is_parallel
            shape, axis = tuple(tensor.shape), attributes.get("partition_dim", 0)
            result.append((i, _Shard(local, names[local], shape, tensor.dtype, split, axis)))
    return result


def _broadcast_from_stage(tensor: Tensor | None, shard: _Shard, stage: int) -> Tensor:
    """The tensor on the ranks of all stages; None is passed on stages that do not hold it."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if tensor is None:
        device = "cpu" if dist.get_backend(group) == "gloo" else torch.cuda.current_device()
        tensor = torch.empty(shard.shape, dtype=shard.dtype, device=device)
    # Collectives need contiguous memory. Detaching also drops the parameter's attributes, so that all stages go on with
    # equal tensors.
    tensor = tensor.detach().contiguous()
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
    return tensor


def _to_hf(bridge: Bridge, shard: _Shard, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Merge the parts of a tensor from all ranks and yield it in Hugging Face format."""
    if match := _EXPERT.search(shard.name):
        # Expert-parallel ranks hold different experts under the same local number.
        per_rank_tensors = _all_gather(tensor, parallel_state.get_expert_model_parallel_group())
        experts_per_rank = bridge.config.num_moe_experts // len(per_rank_tensors)
        prefix = shard.name[: match.start(3)]
        named = [
            (f"{prefix}{int(match[3]) + rank * experts_per_rank}", part) for rank, part in enumerate(per_rank_tensors)
        ]
    else:
        named = [(shard.name, tensor)]
    for name, part in named:
        whole = part
        if shard.split:
            # mbridge reads the split axis from the attributes that Megatron sets on parameters.
            part.partition_dim, part.tensor_model_parallel = shard.axis, True  # type: ignore[attr-defined]
            whole = bridge._weight_merge_across_tp(name, _all_gather(part, _tensor_parallel_group(name)), part)
        yield from zip(*bridge._weight_to_hf_format(name, whole), strict=True)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def _tensor_parallel_group(name: str) -> dist.ProcessGroup:
    """The ranks among which a tensor of this name is divided if it is split; experts have their own group."""
    if _EXPERT.search(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _first_expert(bridge: Bridge) -> int:
    """Number of this rank's first expert in the whole layer."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    if ranks == 1:
        return 0
    return parallel_state.get_expert_model_parallel_rank() * (bridge.config.num_moe_experts // ranks)


def _named_tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    module = unwrap_model(chunk)
    yield from module.named_parameters()
    # The router's load-balancing bias is updated without gradients, so it is a buffer; engines need it all the same.
    yield from ((name, buffer) for name, buffer in module.named_buffers() if "expert_bias" in name)


def _global_names(bridge: Bridge, chunk: torch.nn.Module, *, first_expert: int) -> dict[str, str]:
    """Map names in this chunk to names in the whole model, as mbridge expects them.

    Layers are numbered through all stages. Experts are numbered from `first_expert`, in the form of grouped weights
    (`linear_fc1.weight3`), whichever form the layer has.
    """
    names = bridge._weight_name_mapping_mcore_local_to_global(unwrap_model(chunk), consider_ep=False)

    def renumber(match: re.Match[str]) -> str:
        return f"mlp.experts.linear_fc{match[2]}.weight{first_expert + int(match[1] or match[3])}"

    return {local: _EXPERT.sub(renumber, names[local]) for local, _ in _named_tensors(chunk)}
