"""Weights between Megatron's shards and whole tensors by their Hugging Face names, in every parallel layout.

mbridge knows the names and how tensors are merged and split; which rank holds what is settled here, alike for layers
with Transformer Engine and without.
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
"""An expert's weight: a module of its own, or one of a group's numbered weights."""


@torch.no_grad()
def load_weights(bridge: Bridge, chunks: Sequence[torch.nn.Module], folder: str) -> None:
    """Fill this rank's part of the model. Every rank reads the tensors that it holds a part of."""
    files = bridge._get_safetensor_io(folder)
    for chunk in chunks:
        tensors = unwrap_model(chunk).state_dict()
        for local, name in _names(bridge, chunk, first_expert=_first_expert(bridge)).items():
            sources = bridge._weight_name_mapping_mcore_to_hf(name)
            found = files.load_some_hf_weight(sources)
            whole = bridge._weight_to_mcore_format(name, [found[source] for source in sources])
            group = _sharing(name)
            parts = bridge._weight_split_across_tp(name, whole, tensors[local], group.size())
            tensors[local].copy_(parts[group.rank()])


@dataclass(frozen=True, slots=True)
class _Shard:
    """What all ranks must know of a tensor that one stage holds."""

    local: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: bool
    """Whether the ranks of a layer hold parts of it, or all the same."""
    axis: int


@torch.no_grad()
def export_weights(bridge: Bridge, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """All weights, whole on every rank, each name once. Collective. They may be views: copy what must last."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    held = {(i, name): tensor for i, chunk in enumerate(chunks) for name, tensor in _tensors(chunk)}
    stages: list[list[tuple[int, _Shard]]] = [[] for _ in range(pipeline.size())]
    dist.all_gather_object(stages, _described(bridge, chunks), group=pipeline)
    given: set[str] = set()
    for stage, shards in enumerate(stages):
        for i, shard in shards:
            tensor = held[i, shard.local] if stage == pipeline.rank() else None
            for name, whole in _converted(bridge, shard, _on_all_stages(tensor, shard, stage)):
                # Tied embeddings are there on the first stage and on the last.
                if name not in given:
                    given.add(name)
                    yield name, whole


def _described(bridge: Bridge, chunks: Sequence[torch.nn.Module]) -> list[tuple[int, _Shard]]:
    result = []
    for i, chunk in enumerate(chunks):
        names = _names(bridge, chunk, first_expert=0)
        for local, tensor in _tensors(chunk):
            is_expert = _EXPERT.search(local) is not None
            # Megatron marks the parameters that ranks of a layer hold parts of, and along which axis.
            marks = vars(tensor)
            split = _sharing(names[local]).size() > 1 and (is_expert or marks.get("tensor_model_parallel", False))
            shape, axis = tuple(tensor.shape), marks.get("partition_dim", 0)
            result.append((i, _Shard(local, names[local], shape, tensor.dtype, split, axis)))
    return result


def _on_all_stages(tensor: Tensor | None, shard: _Shard, stage: int) -> Tensor:
    group = parallel_state.get_pipeline_model_parallel_group()
    if tensor is None:
        device = "cpu" if dist.get_backend(group) == "gloo" else torch.cuda.current_device()
        tensor = torch.empty(shard.shape, dtype=shard.dtype, device=device)
    # Contiguous, and apart from the parameter that knows its shard's axis no more.
    tensor = tensor.detach().contiguous()
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
    return tensor


def _converted(bridge: Bridge, shard: _Shard, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if match := _EXPERT.search(shard.name):
        of_ranks = _gathered(tensor, parallel_state.get_expert_model_parallel_group())
        per_rank = bridge.config.num_moe_experts // len(of_ranks)
        prefix = shard.name[: match.start(3)]
        named = [(f"{prefix}{int(match[3]) + rank * per_rank}", part) for rank, part in enumerate(of_ranks)]
    else:
        named = [(shard.name, tensor)]
    for name, part in named:
        whole = part
        if shard.split:
            part.partition_dim, part.tensor_model_parallel = shard.axis, True  # type: ignore[attr-defined]
            whole = bridge._weight_merge_across_tp(name, _gathered(part, _sharing(name)), part)
        yield from zip(*bridge._weight_to_hf_format(name, whole), strict=True)


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def _sharing(name: str) -> dist.ProcessGroup:
    """The ranks that each hold a part of this tensor, where it is split."""
    if _EXPERT.search(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _first_expert(bridge: Bridge) -> int:
    """The number, in the whole layer, of the first expert that this rank holds."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    if ranks == 1:
        return 0
    return parallel_state.get_expert_model_parallel_rank() * (bridge.config.num_moe_experts // ranks)


def _tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    module = unwrap_model(chunk)
    yield from module.named_parameters()
    # The bias that balances experts is trained without gradients.
    yield from ((name, buffer) for name, buffer in module.named_buffers() if "expert_bias" in name)


def _names(bridge: Bridge, chunk: torch.nn.Module, *, first_expert: int) -> dict[str, str]:
    """Names in the whole model, as mbridge knows them, by those in this chunk: layers and experts count through."""
    names = bridge._weight_name_mapping_mcore_local_to_global(unwrap_model(chunk), consider_ep=False)

    def as_numbered(match: re.Match[str]) -> str:
        return f"mlp.experts.linear_fc{match[2]}.weight{first_expert + int(match[1] or match[3])}"

    return {local: _EXPERT.sub(as_numbered, names[local]) for local, _ in _tensors(chunk)}
