"""Which packages the modules with the strictest import rules may import. `tests/processes` checks the other rules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "miles_async"


def imported(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Names of the packages that a file imports."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


@pytest.mark.parametrize("path", sorted((PACKAGE / "scheduling").glob("*.py")), ids=lambda path: path.stem)
def test_scheduling_uses_the_standard_library_alone(path: Path) -> None:
    assert set(imported(path)) <= {*sys.stdlib_module_names, "miles_async"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "cpu_compat").glob("*.py")), ids=lambda path: path.stem)
def test_modules_that_every_import_of_torch_loads_import_only_the_standard_library(path: Path) -> None:
    assert set(imported(path, top_level_only=True)) <= sys.stdlib_module_names
