"""What lets Megatron-core 0.16 run on machines without CUDA. Nothing here is used where CUDA is present.

Megatron names CUDA in a few constructors and asserts even where it computes nothing there. They are answered while the
model is built, while its schedules run and while the optimizer steps; it costs a torch call microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


def on_cpu() -> bool:
    return not torch.cuda.is_available()


@contextmanager
def redirect_cuda_to_cpu() -> Iterator[None]:
    """Within, in this thread, code that asks for CUDA gets the CPU. With CUDA present: nothing happens."""
    if not on_cpu():
        yield
        return
    # Called by Megatron at every forward too; without CUDA it could only raise, so it may stay replaced.
    torch.cuda.current_device = _cpu_device  # type: ignore[assignment]
    # Recomputation keeps and restores the generators of both devices.
    random._get_cuda_rng_state = _no_state
    random._set_cuda_rng_state = _no_state
    # Called when the stages of a pipeline have met.
    torch.cuda.synchronize = _nothing_to_wait_for
    with _CudaMeansCpu():
        yield


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _no_state(*_: Any, **__: Any) -> None:
    return None


def _nothing_to_wait_for(device: object = None) -> None:
    pass


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            # The optimizer tells its kinds of parameters apart by the CUDA names of their types.
            return func(*args, **kwargs).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)
