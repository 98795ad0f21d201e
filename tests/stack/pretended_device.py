"""A CPU that passes for a GPU before Megatron's optimizer that is divided between CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from miles_async.adapters.megatron.model import factory

_COPIES = (Tensor.clone, Tensor.detach, Tensor.float, torch.zeros_like, torch.empty_like)
"""Functions of torch whose results are where their argument is."""


class _Stream:
    def wait_stream(self, stream: _Stream) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event()


class _Event:
    def wait(self, stream: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _PretendedDevice(TorchFunctionMode):
    """Says that all tensors are on a GPU, except copies that are made with `Tensor.cpu`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not in_main_memory(args[0])
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cpu:
            result = args[0].detach().clone()
            result.in_main_memory = True
            return result
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if is_pinned or (func in _COPIES and in_main_memory(args[0])):
            result.in_main_memory = True
        return result


def in_main_memory(tensor: Tensor) -> bool:
    """Whether a tensor is not on the pretended GPU."""
    return "in_main_memory" in vars(tensor)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within the context, this process can create and use an optimizer whose state is offloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "current_stream", _Stream)
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(factory, "on_cpu", lambda: False)
        with _PretendedDevice():
            yield
