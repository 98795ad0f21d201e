"""Stand-ins for what the CPU builds of torchvision and sgl_kernel lack. They do nothing if CUDA is available.

torch calls the functions in its `torch.backends` entry-point group at every `import torch`, in every process. This
module therefore imports only the standard library until it is needed. It is declared in `pyproject.toml`:

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
"""torch removes an operator schema when its library object is garbage-collected, so these objects are kept alive."""


def register() -> None:
    """Define torchvision's operator schemas and an importable `sgl_kernel`. Does nothing if CUDA is available."""
    import torch

    if torch.cuda.is_available():
        return
    _define_torchvision_operators(torch)
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _sgl_kernel()


def _define_torchvision_operators(torch: Any) -> None:
    """Define the schemas of two operators, for which torchvision registers more information when it is imported.

    The CUDA wheel of torchvision cannot load its native library beside a CPU build of torch. Without the library the
    schemas are missing, and `import torchvision` fails.
    """
    if torch.version.cuda is not None or not _cuda_torchvision():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _cuda_torchvision() -> bool:
    """Return whether the CUDA wheel of torchvision is installed, whose version lacks the suffix `+cpu`."""
    try:
        return not importlib.metadata.version("torchvision").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _sgl_kernel() -> ModuleType:
    """Return a module in place of `sgl_kernel`, from which any name can be imported.

    SGLang imports names from `sgl_kernel` at module level, but calls none of them with torch-native attention.
    """

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(
                f"sgl_kernel.{name} needs the CUDA build of sgl_kernel; "
                "on a machine without CUDA, start SGLang with --attention-backend torch_native"
            )

        return kernel

    module = ModuleType("sgl_kernel", "Stand-in for the CUDA kernels on machines without CUDA.")
    module.__getattr__ = missing  # type: ignore[method-assign]
    module.__path__ = []
    return module
