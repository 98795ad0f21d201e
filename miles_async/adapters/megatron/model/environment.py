"""Environment variables that hold for one of the models of a process, while it is built and while it computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Which ways to compute attention Transformer Engine may take, 0 or 1 each."""
_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention"


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """`os.environ` with these, without those that are None, and afterwards as before; all threads see it."""
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
    # It remembers its choice of attention for as long as the shapes stay, whatever the variables say since.
    if variables and (engine := sys.modules.get(_ENGINE)) is not None:
        engine._attention_backends["backend_selection_requires_update"] = True
