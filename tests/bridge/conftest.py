"""These tests need the environment that `make setup-bridge` creates; elsewhere none of them is collected."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_async.adapters.sglang.launch import WITHOUT_COMPILER

# As in a learner's process on a machine without a GPU; torch reads it when it is imported.
os.environ |= WITHOUT_COMPILER


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if find_spec("megatron.bridge") is None and collection_path.name.startswith("test_") else None


def pytest_report_header() -> str | None:
    return None if find_spec("megatron.bridge") else "tests/bridge needs Megatron-Bridge: run make test-bridge"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models of this size are slower with several threads."""
    import torch

    torch.set_num_threads(1)
