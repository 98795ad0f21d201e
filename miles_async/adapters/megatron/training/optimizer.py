"""Optimizer steps that either happen or leave everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel


def clear_gradients(model: MegatronModel) -> None:
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    with redirect_cuda_to_cpu():
        model.optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of one model and optimizer step, reduced over all ranks: nothing has changed yet."""

    metrics: Mapping[str, float]
    finite: bool
    """Whether loss and gradients are. All ranks come to the same verdict, because both are global by then."""
    apply: Callable[[], None]


def reduce_gradients(model: MegatronModel) -> float:
    """Add up the gradients over the ranks; returns their norm before clipping."""
    with redirect_cuda_to_cpu():
        finalize_model_grads(model.chunks)
        model.optimizer.prepare_grads()
        return float(model.optimizer.get_grad_norm())


def apply_gradients(model: MegatronModel, *, lr: float, weight_decay: float) -> None:
    """Clip what `reduce_gradients` left, and step."""
    for group in model.optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]
    with redirect_cuda_to_cpu():
        model.optimizer.step()


class Snapshot:
    """Weights and optimizer state in host memory, for batches of several steps: if a later one fails, none counts."""

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in _tensors(model)]
        self._fresh = len(model.optimizer.state) == 0

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        if self._fresh:
            # Adam's state did not exist before the first step ever; zeros, step count included, are the same.
            for tensor in _state(self._model):
                tensor.zero_()


def _tensors(model: MegatronModel) -> Iterator[Tensor]:
    """Parameters, the optimizer's own copies of them where it has any, and its state; some may come twice."""
    for chunk in model.chunks:
        yield from chunk.module.parameters()
    for group in model.optimizer.param_groups:
        yield from group["params"]
    yield from _state(model)


def _state(model: MegatronModel) -> Iterator[Tensor]:
    for _, state in model.optimizer.state.items():  # Megatron's proxy has no values()
        yield from (value for value in state.values() if isinstance(value, Tensor))
