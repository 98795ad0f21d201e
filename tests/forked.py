"""Processes that are forked from one that has imported what they need, as importing Megatron or torch takes seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_imported: list[str] = []


def forked_from(*modules: str) -> ForkServerContext:
    """The context of such processes. Called when a module is imported, so before the first process starts."""
    _imported.extend(modules)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_imported)
    return context
