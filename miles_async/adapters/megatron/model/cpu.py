"""Makes Megatron-core run on machines without CUDA. Nothing in this module has an effect if CUDA is present.

Megatron names CUDA devices in a few constructors and assertions even if it computes on the CPU. These calls are
redirected while the model is built, while its schedules run and while the optimizer steps, at a cost of microseconds
per torch call. On processors on which torch's products in float32 are slow, linear layers compute them with oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import torch
from megatron.core.tensor_parallel import layers, random
from torch.overrides import TorchFunctionMode

from miles_async.adapters.system.matrix_products import has_slow_mkl, onednn_linear


def on_cpu() -> bool:
    """Whether the learner computes on the CPU because this process sees no CUDA device."""
    return not torch.cuda.is_available()


@contextmanager
def redirect_cuda_to_cpu() -> Iterator[None]:
    """Within the context, torch calls of this thread that ask for CUDA use the CPU. Does nothing if CUDA is present."""
    if not on_cpu():
        yield
        return
    # These replacements stay after the context: without CUDA the originals can only raise, and Megatron calls
    # `current_device` in every forward pass.
    torch.cuda.current_device = _cpu_device  # type: ignore[assignment]
    # Activation recomputation saves and restores the random states of both devices.
    random._get_cuda_rng_state = _no_state
    random._set_cuda_rng_state = _no_state
    # Pipeline stages synchronize after each exchange of activations.
    torch.cuda.synchronize = _do_not_wait
    # Gradients are reduced after the work of the current stream, from Megatron 0.19 on.
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    if has_slow_mkl():
        _use_onednn()
    with _RedirectCuda():
        yield


@contextmanager
def numbered_device() -> Iterator[None]:
    """Within the context, inside `redirect_cuda_to_cpu`, the current device is the number 0, which stands for the CPU.

    Some code builds a `torch.device` of it. A backward pass needs a device instead, because torch runs it without the
    redirection.
    """
    device = torch.cuda.current_device
    if on_cpu():
        torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        torch.cuda.current_device = device


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _no_state(*_: Any, **__: Any) -> None:
    return None


def _do_not_wait(device: object = None) -> None:
    pass


@cache
def _use_onednn() -> None:
    """Let Megatron's linear layers compute their products in `_OneDnnProducts`, forward and backward.

    A mode around the whole step would not do: torch runs a backward pass without the modes that are active around it.
    """
    frozen, trained = layers.LinearWithFrozenWeight, layers.LinearWithGradAccumulationAndAsyncCommunication
    for linear, name in product((frozen, trained), ("forward", "backward")):
        compute = vars(linear)[name].__func__

        def with_onednn(*args: Any, compute: Callable[..., Any] = compute) -> Any:
            with _OneDnnProducts():
                return compute(*args)

        setattr(linear, name, staticmethod(with_onednn))


class _OneDnnProducts(TorchFunctionMode):
    """Computes `matmul` of float32 with oneDNN, inside an autograd function, where autograd records nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.matmul, torch.Tensor.matmul) and not kwargs:
            one, other = args
            if one.dtype is other.dtype is torch.float32 and other.dim() == 2 <= one.dim() and other.numel():
                return onednn_linear(one, other.t())
        return func(*args, **(kwargs or {}))


class _RedirectCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            # Megatron's optimizer sorts parameters by type names such as "torch.cuda.FloatTensor" and refuses others.
            return func(*args, **kwargs).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    """Whether the argument of a torch function is a CUDA device, by name or by number."""
    return type(device) is int or str(device).startswith("cuda")
