"""Converts weights between Megatron's shards and whole tensors with Hugging Face names, in every parallel layout.

The model's plug-in maps names (`miles_async.models.plugin`). This module computes the tensors and decides which rank
holds which part, in the same way for layers with and without Transformer Engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from safetensors import safe_open
from torch import Tensor

from miles_async.adapters.megatron.model.process_groups import all_gather, gather_json
from miles_async.errors import UserError
from miles_async.models.families import HfConfig
from miles_async.models.plugin import (
    Conversion,
    Custom,
    GateUp,
    ModelPlugin,
    QueryKeyValue,
    Same,
    plugin_errors,
)
from miles_async.plugins import name_of

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc(\d)\.weight(\d*)$")
"""Matches an expert's weight: one module per expert, or numbered weights of a module for all experts of a rank."""
_DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class WeightConverter:
    """Computes whole Megatron parameters from the tensors of a checkpoint, and back, as a plug-in maps them.

    Names of parameters are those in the whole model: layers are numbered through all stages, and the weights of experts
    as `linear_fc1.weight3`. `padded_vocabulary` are the rows of Megatron's embedding, and `dtype` is that of the
    parameters.
    """

    def __init__(self, plugin: ModelPlugin, config: HfConfig, *, padded_vocabulary: int, dtype: torch.dtype) -> None:
        self.plugin = plugin
        self._config = config
        self._padded_vocabulary = padded_vocabulary
        self._dtype = dtype
        with plugin_errors(plugin, "map the tensors of the model"):
            self.shape = plugin.shape(config)
            self._outer, self._layer = plugin.outer_tensors(config), plugin.layer_tensors(config)
            self._unused = plugin.unused_tensors(config)

    def hf_names(self, name: str) -> list[str]:
        """Return the tensors of the checkpoint that a parameter holds."""
        layer, expert = _LAYER.match(name), _EXPERT.search(name)
        prefix = self.plugin.hf_layer if layer else ""
        numbers = {"layer": layer[1] if layer else "", "expert": expert[3] if expert else ""}
        return [f"{prefix}{hf_name}".format(**numbers) for hf_name in self.conversion(name).names]

    def to_megatron(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return a whole parameter from the tensors of `hf_names`, in the same order."""
        conversion = self.conversion(name)
        # The bias of a router is kept in float32.
        tensors = [tensor if "expert_bias" in name else tensor.to(self._dtype) for tensor in tensors]
        match conversion:
            case Same():
                [whole] = tensors
                if name in _VOCABULARY and len(whole) == self.shape.vocabulary:
                    return torch.nn.functional.pad(whole, (0, 0, 0, self._padded_vocabulary - len(whole)))
                return whole
            case QueryKeyValue():
                # By key/value head: the query heads that share it, the key head and the value head.
                groups = [_by_group(tensor, self.shape.attention.groups) for tensor in tensors]
                return torch.cat(groups, dim=1).flatten(0, 1)
            case GateUp():
                return torch.cat(list(tensors))
            case Custom():
                with plugin_errors(self.plugin, f"convert {', '.join(self.hf_names(name))} to Megatron's {name}"):
                    return conversion.to_megatron(tensors, self._config)
            case _:
                assert_never(conversion)

    def to_hf(self, name: str, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Return the tensors of the checkpoint, with their names, from a whole parameter."""
        conversion = self.conversion(name)
        match conversion:
            case Same():
                tensors: Sequence[Tensor] = [whole[: self.shape.vocabulary] if name in _VOCABULARY else whole]
            case QueryKeyValue():
                one = self.shape.attention
                sizes = [one.heads // one.groups * one.width, one.width, one.width]
                tensors = [part.flatten(0, 1) for part in _by_group(whole, one.groups).split(sizes, dim=1)]
            case GateUp():
                tensors = whole.chunk(2)
            case Custom():
                with plugin_errors(self.plugin, f"convert Megatron's {name} to {', '.join(self.hf_names(name))}"):
                    tensors = conversion.to_hf(whole, self._config)
            case _:
                assert_never(conversion)
        return list(zip(self.hf_names(name), tensors, strict=True))

    def split(self, name: str, whole: Tensor, shape: Sequence[int], ranks: int) -> list[Tensor]:
        """Split a whole parameter into those of tensor-parallel ranks, which have `shape` if the plug-in is correct."""
        if tuple(shape) == tuple(whole.shape):
            return [whole] * ranks
        if isinstance(self.conversion(name), GateUp):
            # Each rank holds its part of the gate and its part of the up projection.
            return [torch.cat(parts) for parts in zip(*(half.chunk(ranks) for half in whole.chunk(2)), strict=True)]
        sizes = enumerate(zip(shape, whole.shape, strict=False))
        axis = next((axis for axis, (part, full) in sizes if part != full), 0)
        return list(whole.chunk(ranks, axis))

    def merge(self, name: str, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Return a whole parameter from those of tensor-parallel ranks, which are split along `axis`."""
        if isinstance(self.conversion(name), GateUp):
            halves = zip(*(part.chunk(2) for part in parts), strict=True)
            return torch.cat([torch.cat(half) for half in halves])
        return torch.cat(list(parts), axis)

    def unmapped(self, parameters: Iterable[str], checkpoint: Iterable[str]) -> list[str]:
        """Return the tensors of a checkpoint that none of the `parameters` of the whole model holds."""
        used = {_without_numbers(hf_name) for name in parameters for hf_name in self.hf_names(name)}
        return [name for name in checkpoint if _without_numbers(name) not in used and not name.endswith(self._unused)]

    def conversion(self, name: str) -> Conversion:
        """How a parameter follows from tensors of the checkpoint. Raises UserError if the plug-in does not map it."""
        layer = _LAYER.match(name)
        table: Mapping[str, Conversion] = self._layer if layer else self._outer
        key = name[layer.end() :] if layer else name
        if expert := _EXPERT.search(key):
            key = f"{key[: expert.start(3)]}{{expert}}"
        if key not in table:
            raise UserError(
                f"the model plug-in {name_of(self.plugin)} does not map Megatron's parameter {name}; add {key!r} to "
                f"its {'layer_tensors' if layer else 'outer_tensors'}"
            )
        return table[key]


def _by_group(tensor: Tensor, groups: int) -> Tensor:
    return tensor.view(groups, -1, *tensor.shape[1:])


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", name)


@torch.no_grad()
def load_weights(converter: WeightConverter, chunks: Sequence[torch.nn.Module], folder: str) -> None:
    """Load this rank's part of a Hugging Face checkpoint into `chunks`; each rank reads only the tensors it needs.

    This is a collective operation. Raises UserError if the plug-in does not map a parameter, or if the checkpoint lacks
    a tensor or has one that no parameter holds.
    """
    path, plugin = Path(folder).expanduser(), name_of(converter.plugin)
    first_expert = parallel_state.get_expert_model_parallel_rank() * _experts_per_rank(converter)
    loaded: set[str] = set()
    with open_tensors(path) as files:
        for chunk in chunks:
            tensors = unwrap_model(chunk).state_dict()
            for local, name in _global_names(chunk, first_expert=first_expert).items():
                # One Megatron parameter may hold several of Hugging Face's tensors, such as queries, keys and values.
                hf_names = converter.hf_names(name)
                if missing := [hf_name for hf_name in hf_names if hf_name not in files]:
                    raise UserError(
                        f"{path} has no tensor {missing[0]}, which the model plug-in {plugin} maps to Megatron's "
                        f"{name}; correct the plug-in, or use a complete checkpoint in safetensors files"
                    )
                whole = converter.to_megatron(name, [files[hf_name].get_tensor(hf_name) for hf_name in hf_names])
                group = _tensor_parallel_group(name)
                part = converter.split(name, whole, tensors[local].shape, group.size())[group.rank()]
                if part.shape != tensors[local].shape:
                    raise UserError(
                        f"the model plug-in {plugin} converts {', '.join(hf_names)} to the shape {tuple(part.shape)}, "
                        f"but Megatron's {name} has the shape {tuple(tensors[local].shape)}; correct the mapping of "
                        "the tensors, the shape of the model or its transformer_config"
                    )
                tensors[local].copy_(part)
                loaded.add(name)
        everywhere = gather_json(sorted(loaded))
        if unmapped := converter.unmapped(set().union(*everywhere), files):
            raise UserError(
                f"the model plug-in {plugin} does not map {unmapped[0]} of {path} to any parameter of the model; add "
                "it to layer_tensors or outer_tensors, or to unused_tensors if the model does not need it"
            )


@contextmanager
def open_tensors(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the open safetensors file of each tensor in a checkpoint, by the name of the tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        paths = {folder / file for file in json.loads(index.read_text())["weight_map"].values()}
    else:
        paths = set(folder.glob("*.safetensors"))
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt", device="cpu")) for path in sorted(paths)]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118 # it is no dictionary


@dataclass(frozen=True, slots=True)
class _Shard:
    """Description of a tensor on one pipeline stage, which the ranks of all stages need to receive and convert it."""

    local: str
    """Name in its chunk."""
    name: str
    """Name in the whole model, except that experts are numbered from 0 on each rank."""
    shape: tuple[int, ...]
    dtype: str
    """One of `_DTYPES`."""
    split: bool
    """Whether tensor-parallel ranks hold different parts; otherwise they all hold the same."""
    axis: int
    """Dimension along which the tensor is split."""


@torch.no_grad()
def export_weights(converter: WeightConverter, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight once, whole and with its Hugging Face name, on every rank.

    This is a collective operation: all ranks must iterate to the end. Only one whole tensor exists at a time. Tensors
    may be views of parameters, so copy those that must outlast the next optimizer step.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    held = {(i, name): tensor for i, chunk in enumerate(chunks) for name, tensor in _named_tensors(chunk)}
    # Collectives must be entered by all ranks in one order. So every rank first learns the tensors of all stages, and
    # then all ranks go through the stages in order.
    stages = msgspec.convert(gather_json(_describe_shards(chunks), pipeline), list[list[tuple[int, _Shard]]])
    exported: set[str] = set()
    for stage, shards in enumerate(stages):
        for i, shard in shards:
            tensor = held[i, shard.local] if stage == pipeline.rank() else None
            tensor = broadcast_from_stage(tensor, shard.shape, shard.dtype, stage)
            for name, whole in _to_hf(converter, shard, tensor):
                # The first and the last stage both hold tied embeddings.
                if name not in exported:
                    exported.add(name)
                    yield name, whole


def _describe_shards(chunks: Sequence[torch.nn.Module]) -> list[tuple[int, _Shard]]:
    """(number of the chunk, description) of every tensor that this rank holds."""
    result = []
    for i, chunk in enumerate(chunks):
        names = _global_names(chunk, first_expert=0)
        for local, tensor in _named_tensors(chunk):
            expert = _EXPERT.search(local)
            # Megatron sets these attributes on parameters that are split. It does not set them on all experts' weights.
            attributes = vars(tensor)
            is_parallel = expert is not None or attributes.get("tensor_model_parallel", False)
            split = _tensor_parallel_group(names[local]).size() > 1 and is_parallel
            axis = int(expert[2]) - 1 if expert else attributes.get("partition_dim", 0)
            result.append((i, _Shard(local, names[local], tuple(tensor.shape), str(tensor.dtype), split, axis)))
    return result


def broadcast_from_stage(tensor: Tensor | None, shape: Sequence[int], dtype: str, stage: int) -> Tensor:
    """Return the tensor on the ranks of all stages; None is passed on stages that do not hold it.

    `dtype` is the name of a type of torch, such as `torch.float32`.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if tensor is None:
        device = "cpu" if dist.get_backend(group) == "gloo" else torch.cuda.current_device()
        tensor = torch.empty(tuple(shape), dtype=_DTYPES[dtype], device=device)
    tensor = tensor.detach().contiguous()  # collectives need contiguous memory
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
    return tensor


def _to_hf(converter: WeightConverter, shard: _Shard, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Merge the parts of a tensor from all ranks and yield it in Hugging Face format."""
    named = [(shard.name, tensor)]
    if match := _EXPERT.search(shard.name):
        # Expert-parallel ranks hold different experts under the same local number.
        group = parallel_state.get_expert_model_parallel_group()
        prefix, per_rank = shard.name[: match.start(3)], _experts_per_rank(converter)
        named = [
            (f"{prefix}{int(match[3]) + rank * per_rank}", part) for rank, part in enumerate(all_gather(tensor, group))
        ]
    for name, part in named:
        whole = part
        if shard.split:
            whole = converter.merge(name, all_gather(part, _tensor_parallel_group(name)), shard.axis)
        yield from converter.to_hf(name, whole)


def _tensor_parallel_group(name: str) -> dist.ProcessGroup:
    """The ranks among which a tensor of this name is divided if it is split; experts have their own group."""
    if _EXPERT.search(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _experts_per_rank(converter: WeightConverter) -> int:
    """Number of experts of a layer that each expert-parallel rank holds; 0 for a dense model."""
    experts = converter.shape.experts
    return experts.count // parallel_state.get_expert_model_parallel_world_size() if experts else 0


def _named_tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    module = unwrap_model(chunk)
    # Adapters have a format of their own (`lora.py`).
    yield from ((name, one) for name, one in module.named_parameters() if ".adapters." not in name)
    # The router's load-balancing bias is updated without gradients, so it is a buffer; engines need it all the same.
    yield from ((name, buffer) for name, buffer in module.named_buffers() if "expert_bias" in name)


def _global_names(chunk: torch.nn.Module, *, first_expert: int) -> dict[str, str]:
    """Map names in this chunk to names in the whole model.

    Layers are numbered through all stages, from 0. Experts are numbered from `first_expert`, in the form of grouped
    weights (`linear_fc1.weight3`), whichever form the layer has.
    """
    layers = [layer.layer_number - 1 for layer in unwrap_model(chunk).decoder.layers]

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{layers[int(match[1])]}."

    def expert(match: re.Match[str]) -> str:
        return f"mlp.experts.linear_fc{match[2]}.weight{first_expert + int(match[1] or match[3])}"

    return {local: _EXPERT.sub(expert, _LAYER.sub(layer, local)) for local, _ in _named_tensors(chunk)}
