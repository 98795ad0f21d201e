"""Optimizer steps that either happen completely or leave the model unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.factory import MegatronModel


@dataclass(frozen=True, slots=True)
class Gradients:
    """Result of one model's forward and backward passes, reduced over all ranks. The weights have not changed yet."""

    metrics: Mapping[str, float]
    finite: bool
    """Whether loss and gradients are finite. Both are global, so all ranks come to the same result."""
    apply: Callable[[], None]
    """Takes the optimizer step."""


def clear_gradients(model: MegatronModel) -> None:
    """Set all gradients to zero before the first micro-batch of a step."""
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    with redirect_cuda_to_cpu():
        model.optimizer.zero_grad()


def reduce_gradients(model: MegatronModel) -> float:
    """Add up the gradients over the ranks and return their norm before clipping.

    `apply_gradients` completes the step. Megatron's `step` does both, but a step whose loss or gradient is not finite
    must be stopped in between, for policy and critic together.
    """
    with redirect_cuda_to_cpu():
        finalize_model_grads(model.chunks)
        model.optimizer.prepare_grads()
        return float(model.optimizer.get_grad_norm())


def apply_gradients(model: MegatronModel, *, lr: float, weight_decay: float) -> None:
    """Clip the reduced gradients and update the weights."""
    for group in model.optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]  # 0 for norms and biases
        if on_cpu():
            # One pass over the memory of a parameter instead of ten, in a fifth of the time. It is set in each step,
            # because loading a checkpoint replaces the settings of the groups.
            group["fused"] = True
    with redirect_cuda_to_cpu():
        model.optimizer.step()


def model_tensors(model: MegatronModel) -> Iterator[Tensor]:
    """Parameters, the optimizer's own copies (fp32 masters) and its state; the same tensor may appear twice."""
    for chunk in model.chunks:
        yield from chunk.module.parameters()
    for group in model.optimizer.param_groups:
        yield from group["params"]
    yield from _state_tensors(model)


class Snapshot:
    """Copy of weights and optimizer state in host memory.

    A batch of several optimizer steps is restored from it if a later step fails, so that all of its steps count or
    none.
    """

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in model_tensors(model)]
        self._is_before_first_step = len(model.optimizer.state) == 0

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the model and optimizer to the time when the snapshot was taken."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        if self._is_before_first_step:
            # Adam creates its state in its first step, so the snapshot has none. Zeros, including the step count, are
            # equivalent.
            for tensor in _state_tensors(self._model):
                tensor.zero_()


def _state_tensors(model: MegatronModel) -> Iterator[Tensor]:
    for _, state in model.optimizer.state.items():  # Megatron's proxy has no values()
        yield from (value for value in state.values() if isinstance(value, Tensor))
