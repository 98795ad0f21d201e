"""Which packages the modules with the strictest import rules may import. `tests/processes` checks the other rules."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "miles_async"


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


def modules_that_know_guests() -> list[str]:
    """The modules that the import rule for guests excepts."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [rule] = [contract for contract in contracts if contract["id"] == "guests"]
    return sorted({line.partition(" -> ")[0] for line in rule["ignore_imports"]})


def test_only_the_names_that_users_type_lead_to_guests() -> None:
    assert modules_that_know_guests() == [
        "miles_async",
        "miles_async.rollout.rm_hub",
        "miles_async.rollout.sglang_rollout",
        "miles_async.rollout.windowed_fifo_rollout",
        "miles_async.skip",
    ]


@pytest.mark.parametrize("module", [module for module in modules_that_know_guests() if module != "miles_async"])
def test_a_module_that_knows_guests_only_exports_their_names(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    docstring, *imports, names = ast.parse(Path(spec.origin).read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(names, ast.Assign)
    assert ast.unparse(names.targets[0]) == "__all__"
    imported = [
        alias.asname or alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert sorted(imported) == sorted(ast.literal_eval(names.value))
