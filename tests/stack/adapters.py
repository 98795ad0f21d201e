"""Adapters with random numbers, and the models that they make of a base model."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from transformers import PreTrainedModel

from miles_async.models.lora import AdapterConfig, tensor_names
from miles_async.models.lora_layers import FEED_FORWARD, HEAD, MODULES

RANK = 8
CONFIG = AdapterConfig(rank=RANK, scale=2.0, modules=(*MODULES, HEAD))


def adapter_of(model: PreTrainedModel, version: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Another adapter for each version, by PEFT's names. It moves log-probabilities by more than any tolerance."""
    numbers = torch.Generator().manual_seed(version)
    tensors = {}
    for name, weight in _adapted(model):
        of_a, of_b = tensor_names(name)
        tensors[of_a] = 0.1 * torch.randn(rank, weight.shape[1], generator=numbers)
        tensors[of_b] = 0.1 * torch.randn(weight.shape[0], rank, generator=numbers)
    return tensors


def merged(model: PreTrainedModel, version: int) -> PreTrainedModel:
    """The base model with the adapter of a version in its weights, as a plain computation in PyTorch."""
    tensors, changed = adapter_of(model, version), deepcopy(model)
    changed.lm_head.weight = torch.nn.Parameter(changed.lm_head.weight.clone())  # it may be that of the embedding
    with torch.no_grad():
        for name, weight in _adapted(changed):
            of_a, of_b = tensor_names(name)
            weight.add_(CONFIG.scale * tensors[of_b] @ tensors[of_a])
    return changed


def _adapted(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that get an adapter, by the names of Hugging Face's files, where every expert has its own tensors."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in CONFIG.modules and isinstance(module, torch.nn.Linear):
            yield name, module.weight
        elif last == "experts":
            for expert in range(module.num_experts):
                gate, up = module.gate_up_proj[expert].chunk(2)
                weights = zip(FEED_FORWARD, (gate, up, module.down_proj[expert]), strict=True)
                yield from ((f"{name}.{expert}.{layer}", weight) for layer, weight in weights)
