"""Matrix products in float32 with oneDNN, for processors on which torch's default library MKL is slow."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@cache
def has_slow_mkl() -> bool:
    """Return whether MKL, which torch uses for products in float32, runs at half speed: on processors by AMD."""
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "AuthenticAMD" in processor.read_text() and torch.backends.mkldnn.is_available()


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` for `x` [..., k] and `weight` [n, k]. Autograd cannot differentiate the result."""
    # The operator that torch's compiler uses for linear layers.
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product
