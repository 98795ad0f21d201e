"""Stand-ins for what the CPU builds of torchvision and sgl_kernel lack. They do nothing if CUDA is available.

Each program of this project that may import SGLang, or a model of transformers, calls `install` first. Programs of
others do not load this module, so it cannot break them. It imports only the standard library until it is needed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_kept: list[Any] = []
"""torch removes an operator schema when its library object is garbage-collected, so these objects are kept alive."""


def install() -> None:
    """Let this process import torchvision and `sgl_kernel` without CUDA. Imports neither of them, and not torch."""
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        # Python asks the finders in order: the first one prepares an import, the last one stands in for all others.
        sys.meta_path.insert(0, _TorchvisionFinder())
        sys.meta_path.append(_SglKernel())


class _TorchvisionFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "torchvision" else None
        # Many programs ask whether torchvision is installed and do not import it, so the loader does the work.
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchvisionLoader(spec.loader)
        return spec


class _TorchvisionLoader(Loader):
    """Defines the operator schemas of torchvision before torchvision is imported."""

    def __init__(self, original: Loader) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "it is imported by its spec"
        module.__spec__.loader = module.__loader__ = self._original
        _define_torchvision_operators()
        self._original.exec_module(module)


class _SglKernel(MetaPathFinder, Loader):
    """Makes a module in place of `sgl_kernel`, from which any name can be imported.

    SGLang imports names from `sgl_kernel` at module level, but calls none of them with torch-native attention.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "sgl_kernel" or _has_cuda():
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Stand-in for the CUDA kernels on machines without CUDA."
        module.__getattr__ = _missing_kernel  # type: ignore[method-assign]


def _missing_kernel(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs the CUDA build of sgl_kernel; "
            "on a machine without CUDA, start SGLang with --attention-backend torch_native"
        )

    return kernel


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _define_torchvision_operators() -> None:
    """Define the schemas of two operators, for which torchvision registers more information when it is imported.

    The CUDA wheel of torchvision cannot load its native library beside a CPU build of torch. Without the library the
    schemas are missing, and `import torchvision` fails.
    """
    import torch

    if torch.version.cuda is not None or _kept or not _is_cuda_build_of_torchvision():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _is_cuda_build_of_torchvision() -> bool:
    """Return whether the CUDA wheel of torchvision is installed, whose version lacks the suffix `+cpu`."""
    try:
        return not importlib.metadata.version("torchvision").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
