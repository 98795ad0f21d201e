"""Adapters of the experts of a layer in one pair of matrices, as PEFT has them if the experts are a parameter.

In transformers 5, a layer has two parameters for all its experts: one for their gate and up projections, and one for
their down projections. PEFT adapts such a parameter with `target_parameters`. Learners and engines have an adapter for
each linear layer of each expert. This module converts one form into the other.

With E experts, rank r, and I inputs and O outputs of an expert's layer, PEFT 0.21 (`ParamWrapper`) has these matrices:

- A [E r, I] and B [O, r E] for down projections. Row `expert * r + i` of A and column `i * E + expert` of B belong
  together.
- A [E 2r, I] and B [2 O, 2r E] for gate and up projections, in the same order. Of the 2r ranks of an expert, the first
  r are those of its gate. B is 0 where an output of one projection meets a rank of the other.

PEFT wraps the module of the experts once for each parameter, so the names of the second pair contain `base_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_async.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from miles_async.models.lora import AdapterConfig

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
PARAMETERS: Mapping[str, Sequence[str]] = {_GATE_UP: ("gate_proj", "up_proj"), _DOWN: ("down_proj",)}
"""Parameters of all experts of a layer, each with the linear layers of an expert that it has. A checkpoint has a tensor
for each parameter, or for each linear layer."""
_PARAMETER_OF = {kind: parameter for parameter, kinds in PARAMETERS.items() for kind in kinds}
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(lora_[AB]\.weight)")
_OF_ALL = re.compile(r"(.+\.experts)(\.base_layer)?\.(lora_[AB]\.weight)")
_A, _B = "lora_A.weight", "lora_B.weight"


def peft_entries(rank: int, alpha: float) -> dict[str, Any]:
    """What `adapter_config.json` says of packed adapters of experts. `rank` and `alpha` are those of other adapters."""
    layers = len(PARAMETERS[_GATE_UP])
    return {
        "target_parameters": [f"mlp.experts.{parameter}" for parameter in PARAMETERS],
        "rank_pattern": {_GATE_UP: layers * rank},
        "alpha_pattern": {_GATE_UP: layers * alpha},
    }


def pack(tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
    """Pack the adapters of experts. `tensors` have PEFT's names, and other adapters stay as they are."""
    packed = {name: tensor for name, tensor in tensors.items() if not _OF_EXPERT.fullmatch(name)}
    for block, experts in _experts_of(tensors).items():
        for parameter, kinds in PARAMETERS.items():
            of_a, of_b = (tensors[f"{block}.0.{kinds[0]}.{side}"] for side in (_A, _B))
            a = of_a.new_zeros(experts, len(kinds), *of_a.shape)
            b = of_b.new_zeros(experts, len(kinds) * len(of_b), len(kinds) * config.rank)
            for number, kind in enumerate(kinds):
                part = _part_of(b, kind, config)
                for expert in range(experts):
                    a[expert, number] = tensors[f"{block}.{expert}.{kind}.{_A}"]
                    part[expert] = tensors[f"{block}.{expert}.{kind}.{_B}"]
            packed[_packed_name(block, parameter, _A)] = a.flatten(0, 2)
            packed[_packed_name(block, parameter, _B)] = b.permute(1, 2, 0).flatten(1)
    return packed


def unpack(tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
    """The reverse of `pack`. Raises UserError if a gate and an up projection have ranks in common."""
    unpacked = {name: tensor for name, tensor in tensors.items() if not _OF_ALL.fullmatch(name)}
    for name, of_a in tensors.items():
        match = _OF_ALL.fullmatch(name)
        if match is None or match[3] != _A:
            continue
        block, parameter = match[1], _GATE_UP if match[2] else _DOWN
        kinds, of_b = PARAMETERS[parameter], tensors[_packed_name(block, parameter, _B)]
        a = of_a.unflatten(0, (-1, len(kinds), config.rank))
        b = of_b.unflatten(1, (-1, len(a))).permute(2, 0, 1)
        parts = [_part_of(b, kind, config) for kind in kinds]
        if sum(part.count_nonzero() for part in parts) != b.count_nonzero():
            raise UserError(
                f"lora_load: the gate and up projections of {block.removeprefix('base_model.model.')} have ranks in "
                "common: use a folder that save_hf has written"
            )
        for number, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
            for expert in range(len(a)):
                unpacked[f"{block}.{expert}.{kind}.{_A}"] = a[expert, number]
                unpacked[f"{block}.{expert}.{kind}.{_B}"] = part[expert]
    return unpacked


def packed_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The shapes of the tensors that `pack` returns for tensors of these shapes."""
    packed: dict[str, list[int]] = {}
    for name, (rows, columns) in shapes.items():
        if (match := _OF_EXPERT.fullmatch(name)) is None:
            packed[name] = [rows, columns]
            continue
        block, expert, kind, side = match.groups()
        whole = packed.setdefault(_packed_name(block, _PARAMETER_OF[kind], side), [0, 0])
        if side == _A:
            whole[:] = whole[0] + rows, columns
        else:
            # Each expert has its own columns, and each layer of an expert has its own rows, too.
            whole[:] = whole[0] + (rows if expert == "0" else 0), whole[1] + columns
    return packed


def linear_layers_in(name: str, tensor: Tensor, config: AdapterConfig) -> Iterator[tuple[str, Tensor]]:
    """The linear layers whose weights a tensor of a checkpoint has: names, and views [outputs, inputs].

    The tensor has one layer, or those of all experts: [experts, outputs, inputs], or in gpt-oss [experts, inputs,
    outputs].
    """
    block, _, parameter = name.rpartition(".")
    if not block.endswith(".experts") or parameter not in PARAMETERS:
        yield name.removesuffix(".weight"), tensor
        return
    whole = tensor.transpose(1, 2) if config.alternates else tensor
    for kind in PARAMETERS[parameter]:
        for expert, weight in enumerate(_outputs_of(whole, kind, config)):
            yield f"{block}.{expert}.{kind}", weight


def _experts_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Blocks of experts, such as `base_model.model.model.layers.0.mlp.experts`, and how many experts they have."""
    experts: dict[str, int] = {}
    for name in tensors:
        if match := _OF_EXPERT.fullmatch(name):
            experts[match[1]] = max(experts.get(match[1], 0), int(match[2]) + 1)
    return experts


def _packed_name(block: str, parameter: str, side: str) -> str:
    return f"{block}{'.base_layer' if parameter == _GATE_UP else ''}.{side}"


def _outputs_of(whole: Tensor, kind: str, config: AdapterConfig) -> Tensor:
    """Of a tensor [experts, outputs of the parameter, ...], the outputs of one kind of layer."""
    if kind in PARAMETERS[_DOWN]:
        return whole
    number = PARAMETERS[_GATE_UP].index(kind)
    return whole[:, number::2] if config.alternates else whole.chunk(2, 1)[number]


def _part_of(whole: Tensor, kind: str, config: AdapterConfig) -> Tensor:
    """Of B [experts, outputs of the parameter, ranks of the parameter], B of one kind of layer."""
    number = PARAMETERS[_PARAMETER_OF[kind]].index(kind)
    part: Tensor = _outputs_of(whole, kind, config).split(config.rank, 2)[number]
    return part
