"""Environment variables that apply to one of a process's models only: policy, reference model or critic."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from miles_async.adapters.system.environment import variables_set
from miles_async.config.schema import Learner

_KERNELS = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}
ATTENTION = tuple(_KERNELS)
"""Transformer Engine reads these (0 or 1) to decide which attention kernels it may use."""
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    # Transformer Engine's attention has kernels whose backward pass is not deterministic.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Variables under which CUDA's libraries and Transformer Engine use deterministic algorithms only."""
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention"


def attention_kernels(settings: Learner) -> dict[str, str]:
    """Return the variables that let Transformer Engine use only the attention kernels of the settings."""
    if settings.attention_backend == "auto":
        return {}
    return {name: str(int(settings.attention_backend == kernels)) for name, kernels in _KERNELS.items()}


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """As `variables_set`, and let Transformer Engine read the variables again."""
    try:
        with variables_set(variables):
            _choose_kernels_again(variables)
            yield
    finally:
        _choose_kernels_again(variables)


def _choose_kernels_again(variables: Mapping[str, str | None]) -> None:
    # Transformer Engine caches its choice of kernel until the shapes change. Without this flag the next model would run
    # with the previous model's choice.
    if variables and (engine := sys.modules.get(_TRANSFORMER_ENGINE)) is not None:
        engine._attention_backends["backend_selection_requires_update"] = True
