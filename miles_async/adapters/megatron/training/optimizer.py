"""Optimizer steps that either happen completely or leave the model unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor, UntypedStorage

from miles_async.adapters.megatron.model.cpu import on_cpu, redirect_cuda_to_cpu
from miles_async.adapters.megatron.model.factory import TrainedModel
from miles_async.adapters.megatron.model.host_memory import copy_tensors


def _norm(_: int, __: Tensor, tensor_lists: list[list[Tensor]], ___: bool) -> tuple[Tensor, None]:
    """[1] the norm of all tensors together, with the signature that Megatron calls."""
    norms = torch.stack(torch._foreach_norm(tensor_lists[0], 2, torch.float32))
    return torch.linalg.vector_norm(norms)[None], None


if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
    # Megatron's own, without Transformer Engine and Apex, waits for the GPU once per tensor.
    clip_grads.l2_norm_impl = _norm


@dataclass(frozen=True, slots=True)
class Gradients:
    """Result of one model's forward and backward passes, reduced over all ranks. The weights have not changed yet."""

    metrics: Mapping[str, float]
    finite: bool
    """Whether loss and gradients are finite. Both are global, so all ranks come to the same result."""
    apply: Callable[[], None]
    """Takes the optimizer step."""


def complete_gradients(
    model: TrainedModel, metrics: Mapping[str, float], lr: float, *, loss: float, empty: bool, prefix: str
) -> Gradients:
    """Reduce the gradients of a step; adds its gradient norm and learning rate to the metrics, after `prefix`.

    `loss` is that of all ranks. `empty` means that no token has a gradient, so the metrics have neither of the two.

    - `grad_norm`: Norm of the gradient before clipping. Worry if it is often more than 4 times its usual value: lower
      `--lr` or `--max-weight-staleness`.
    - `lr`: Learning rate of the step.
    """
    if empty:
        # There is nothing to learn, but Adam's momentum would still move the weights.
        return Gradients(metrics, finite=True, apply=lambda: None)
    norm = reduce_gradients(model)

    def apply() -> None:
        apply_gradients(model, lr)
        model.steps_taken += 1

    finite = math.isfinite(loss) and math.isfinite(norm)
    return Gradients({**metrics, f"{prefix}grad_norm": norm, f"{prefix}lr": lr}, finite, apply)


def clear_gradients(model: TrainedModel) -> None:
    """Set all gradients to zero before the first micro-batch of a step."""
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    with redirect_cuda_to_cpu():
        model.optimizer.zero_grad()


def reduce_gradients(model: TrainedModel) -> float:
    """Add up the gradients over the ranks and return their norm before clipping.

    `apply_gradients` completes the step. Megatron's `step` does both, but a step whose loss or gradient is not finite
    must be stopped in between, for policy and critic together.
    """
    with redirect_cuda_to_cpu():
        finalize_model_grads(model.chunks)
        model.optimizer.prepare_grads()
        return float(model.optimizer.get_grad_norm())


def apply_gradients(model: TrainedModel, lr: float) -> None:
    """Clip the reduced gradients and update the weights."""
    for group in model.optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = model.settings.weight_decay * group["wd_mult"]  # 0 for norms and biases
        if on_cpu():
            # One pass over the memory of a parameter instead of ten, in a fifth of the time. It is set in each step,
            # because loading a checkpoint replaces the settings of the groups.
            group["fused"] = True
    with redirect_cuda_to_cpu():
        model.optimizer.step()


def complete_weights(model: TrainedModel) -> None:
    """Get the weights that other data-parallel ranks have updated in the last step, if this was left to the next one.

    All ranks must call it before weights are read other than by a forward pass.
    """
    if model.chunks[0].ddp_config.overlap_param_gather:
        for chunk in model.chunks:
            chunk.start_param_sync(force_sync=True)


def model_tensors(model: TrainedModel, *, frozen: bool = True) -> Iterator[Tensor]:
    """Parameters, the optimizer's own copies (fp32 masters) and its state; the same tensor may appear twice.

    What an offloaded optimizer keeps in main memory is among them. Without `frozen`, weights that are not trained are
    left out.
    """
    for chunk in model.chunks:
        yield from (parameter for parameter in chunk.module.parameters() if frozen or parameter.requires_grad)
    for optimizer in model.inner_optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if model.settings.has_adam_of_transformer_engine:
            # The factors of states in fp16.
            for scales in optimizer._scales.values():  # type: ignore[attr-defined]
                yield from scales.values()


def routing_biases(model: TrainedModel) -> list[Tensor]:
    """The biases with which routers balance experts. `reduce_gradients` changes them, and no optimizer holds them."""
    buffers = (named for chunk in model.chunks for named in chunk.module.named_buffers())
    return [buffer for name, buffer in buffers if name.endswith("expert_bias")]


def distinct_storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The distinct storages of these tensors, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def contents(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage, as a tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Snapshot:
    """Copy of weights, optimizer state and step count in host memory, one at a time for each model.

    A batch of several optimizer steps is restored from it if a later step fails, so that all of its steps count or
    none. Without `weights` it only has what a step changes that is not taken: the biases of routers.
    """

    def __init__(self, model: TrainedModel, *, weights: bool = True) -> None:
        self._model, self._steps_taken = model, model.steps_taken
        tensors = chain(routing_biases(model), model_tensors(model, frozen=False) if weights else ())
        self._storages = list(distinct_storages(tensors).values())
        self._copies = model.host_memory.copy(list(map(contents, self._storages)))
        self._is_before_first_step = not any(optimizer.state for optimizer in model.inner_optimizers)
        self._counts = step_counts(model)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the model and optimizer to the time when the snapshot was taken."""
        self._model.steps_taken = self._steps_taken
        copy_tensors(zip(map(contents, self._storages), self._copies, strict=True))
        set_step_counts(self._model, self._counts)
        if self._is_before_first_step:
            # Optimizers create their state in their first step.
            for optimizer in self._model.inner_optimizers:
                optimizer.state.clear()


def step_counts(model: TrainedModel) -> list[Any]:
    """The steps that fused optimizers count in each parameter group; None where a group has no count."""
    return [group.get("step") for group in _inner_groups(model)]


def set_step_counts(model: TrainedModel, counts: Sequence[Any]) -> None:
    """Set what `step_counts` has returned."""
    for group, count in zip(_inner_groups(model), counts, strict=True):
        group.pop("step", None)
        if count is not None:
            group["step"] = count


def _inner_groups(model: TrainedModel) -> list[dict[str, Any]]:
    """The parameter groups of the optimizers that compute the steps."""
    return [group for optimizer in model.inner_optimizers for group in optimizer.param_groups]
