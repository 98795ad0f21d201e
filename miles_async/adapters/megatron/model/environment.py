"""Environment variables that apply to one of a process's models only: policy, reference model or critic."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Transformer Engine reads these (0 or 1) to decide which attention kernels it may use."""
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention"


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set the variables in `os.environ` within the context and restore them afterwards; None unsets a variable.

    The environment belongs to the process, so all threads see the change.
    """
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    # Transformer Engine caches its choice of kernel until the shapes change. Without this flag the next model would run
    # with the previous model's choice.
    if variables and (engine := sys.modules.get(_TRANSFORMER_ENGINE)) is not None:
        engine._attention_backends["backend_selection_requires_update"] = True
