"""Stand-ins for GPU libraries, without which some of Megatron's modules cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


@contextmanager
def stand_in(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Within the context, imports of these modules succeed, and give the names in them or classes without content."""
    for name, content in modules.items():
        module = _StandIn(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (torch.nn.Module,), {})


class _Nothing(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (torch.nn.Module,), {})
