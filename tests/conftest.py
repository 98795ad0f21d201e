"""Settings for all tests: those in `stack/` carry the marker, and property tests draw the same examples everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Shared cores make any deadline flaky, and a suite that gates merges must not draw new cases on its own.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

STACK = Path(__file__).parent / "stack"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if STACK in item.path.parents:
            item.add_marker(pytest.mark.stack)
