"""What the CPU builds lack, filled in when torch is imported; inert where CUDA is present.

torch calls the functions of its `torch.backends` entry-point group on every `import torch`, in every process, so this
module imports only the standard library until it has to act. Declared in `pyproject.toml`:

    [project.entry-points."torch.backends"]
    miles_async = "miles_async.cpu_compat:register"
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any

_kept: list[Any] = []
"""torch forgets an operator schema when its library object is collected."""


def register() -> None:
    """Define torchvision's operator schemas and offer an importable `sgl_kernel`; do nothing with CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    _define_torchvision_operators(torch)
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _sgl_kernel()


def _define_torchvision_operators(torch: Any) -> None:
    """torchvision describes these two at import; its CUDA wheel cannot load beside a CPU torch and define them."""
    if torch.version.cuda is not None or not _cuda_torchvision():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _cuda_torchvision() -> bool:
    """The package index serves the CUDA wheel under a bare version; the CPU wheel's ends in `+cpu`."""
    try:
        return not importlib.metadata.version("torchvision").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _sgl_kernel() -> ModuleType:
    """SGLang imports names from `sgl_kernel` at module level; with torch-native attention it calls none of them."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(
                f"sgl_kernel.{name} needs the CUDA build of sgl_kernel; "
                "on a CPU machine start SGLang with --attention-backend torch_native"
            )

        return kernel

    module = ModuleType("sgl_kernel", "Stands in for the CUDA kernels on machines without CUDA.")
    module.__getattr__ = missing  # type: ignore[method-assign]
    module.__path__ = []
    return module
