"""Settings for all tests: those in `stack/` carry the marker, and property tests draw the same examples everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Shared cores make any deadline flaky, and a suite that gates merges must not draw new cases on its own.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

STACK = Path(__file__).parent / "stack"
SHARED = ("stack", "serving")
"""Fixtures that last the whole session: all tests that use one run in the same process, the longest share first."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (`make test`), hand out whole files, and all that share a cluster or an engine as one."""
    for item in items:
        if STACK in item.path.parents:
            item.add_marker(pytest.mark.stack)
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    if config.getoption("dist") != "no":
        items.sort(key=lambda item: [*SHARED, "tests/stack", "tests/sim", "tests/unit"].index(_kind(item)))


def _group(item: pytest.Item) -> str:
    return next((name for name in SHARED if name in item.fixturenames), item.path.stem)


def _kind(item: pytest.Item) -> str:
    group = _group(item)
    return group if group in SHARED else f"tests/{item.path.parent.name}"
