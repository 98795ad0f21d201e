"""Cheaper imports of torch, SGLang and Megatron, which take most of the CPU time of a start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""Environment variables that turn `torch.compile` off. Set them before the process imports torch.

SGLang and Megatron decorate functions with `torch.compile` at module level, and the first decorator imports
TorchInductor, which has 500 modules. Without CUDA the functions are small, and compiling them would need a C++
compiler.
"""


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Turn the cyclic garbage collector off inside the block, which should contain only imports.

    Modules, functions and classes stay alive, so the collector would traverse them dozens of times and free nothing. At
    the end they are excluded from later collections (`gc.freeze`), as the documentation of `gc` recommends before a
    fork: a collection in a forked process would otherwise write to, and thereby copy, each page of memory.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
