"""The form in which SGLang 0.5.20 loads the adapters of some layers, which differs from PEFT's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from miles_async.models.lora import AdapterConfig
from miles_async.models.lora_layers import engine_modules, joins_gate_and_up

_QKV = ".in_proj_qkv."


def for_engines(tensors: Mapping[str, Tensor], config: AdapterConfig) -> tuple[dict[str, Tensor], AdapterConfig]:
    """An adapter in the form that SGLang 0.5.20 loads, which computes the same. `tensors` have PEFT's names.

    - SGLang loads the projection `in_proj_qkv` of linear attention as three layers. They have the same A, and the rows
      of B are divided.
    - The rows of gate and up projections of experts alternate in gpt-oss. SGLang multiplies the first half of the rows
      by A of the gate, and the others by A of the up projection (`lora_moe_runners.py`, `_add_lora_gate_up_delta`). So
      both get the same A here, which has the rows of both. The rank is twice as large, and zeros fill it elsewhere.
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _QKV not in name:
            converted[name] = tensor
            continue
        parts: Sequence[Tensor] = (tensor,) * 3
        if ".lora_B." in name:
            values = len(tensors[name.replace(_QKV, ".in_proj_z.")])
            keys = (len(tensor) - values) // 2
            parts = tensor.split([keys, keys, values])
        # A safetensors file holds no tensors that share memory.
        converted |= {
            name.replace(_QKV, f".in_proj_{one}."): part.clone() for one, part in zip("qkv", parts, strict=True)
        }
    config = replace(config, modules=engine_modules(config.modules))
    if not joins_gate_and_up(config.modules, alternates=config.alternates):
        return converted, config
    rank = config.rank
    joined: dict[str, Tensor] = {}
    for name, tensor in converted.items():
        if ".lora_B." in name:
            joined[name] = pad(tensor, (rank, 0) if ".up_proj." in name else (0, rank))
        elif ".gate_proj." in name:
            joined[name] = torch.cat([tensor, converted[name.replace(".gate_proj.", ".up_proj.")]])
            joined[name.replace(".gate_proj.", ".up_proj.")] = joined[name].clone()
        elif ".up_proj." not in name:
            joined[name] = pad(tensor, (0, 0, 0, rank))
    return joined, replace(config, rank=2 * rank)
