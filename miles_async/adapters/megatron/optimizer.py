"""Optimizer steps that either happen or leave everything as it was."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from miles_async.adapters.megatron.cpu import cuda_means_cpu
from miles_async.adapters.megatron.model import Model
from miles_async.config.schema import Learner


def learning_rate(settings: Learner, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` of `total_steps`, counted from 0.

    It rises in a straight line over `lr_warmup_steps`; under `linear` decay it falls at the same time towards 0, which
    it would reach one step after the last.
    """
    warmth = min(1.0, (step + 1) / max(1, settings.lr_warmup_steps))
    if settings.lr_decay_style == "constant":
        return settings.lr * warmth
    return settings.lr * warmth * max(0.0, 1 - step / total_steps)


def clear_gradients(model: Model) -> None:
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    with cuda_means_cpu():
        model.optimizer.zero_grad()


def take_step(model: Model, *, lr: float, weight_decay: float, loss_is_finite: bool) -> tuple[bool, float]:
    """Reduce the gradients over ranks and step. Returns whether it stepped, and the gradient norm before clipping.

    Nothing is changed when loss or gradient are not finite; all ranks come to the same verdict, because both are
    global by then.
    """
    with cuda_means_cpu():
        finalize_model_grads(model.chunks)
        model.optimizer.prepare_grads()
        norm = float(model.optimizer.get_grad_norm())
        if not (loss_is_finite and math.isfinite(norm)):
            return False, norm
        for group in model.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay * group["wd_mult"]
        model.optimizer.step()
    return True, norm


class Snapshot:
    """Weights and optimizer state in host memory, for batches of several steps: if a later one fails, none counts."""

    def __init__(self, model: Model) -> None:
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


def _tensors(model: Model) -> Iterator[Tensor]:
    """Parameters, the optimizer's own copies of them where it has any, and its state; some may come twice."""
    for chunk in model.chunks:
        yield from chunk.module.parameters()
    for group in model.optimizer.param_groups:
        yield from group["params"]
    yield from _state(model)


def _state(model: Model) -> Iterator[Tensor]:
    for _, state in model.optimizer.state.items():  # Megatron's proxy has no values()
        yield from (value for value in state.values() if isinstance(value, Tensor))
