"""The names of slime and Miles in a test, which are gone afterwards."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from miles_async.compat.slime.imports import PROJECTS, install_slime_imports


@contextmanager
def names_of_slime() -> Iterator[None]:
    """The names that `--slime-imports` installs. Those of `Sample` stay until the end of the test."""
    before = set(sys.modules)
    try:
        install_slime_imports()
        yield
    finally:
        forget(before)


def forget(before: set[str]) -> None:
    """Forget the modules of other projects, and their examples, that were imported since `before`."""
    for added in sys.modules.keys() - before:
        if added.partition(".")[0] in (*PROJECTS, "examples"):
            del sys.modules[added]


def of_miles(module: str) -> Any:
    """A module of Miles below `miles.rollout`, as functions of users import it."""
    return importlib.import_module(f"miles.rollout.{module}")


def checkout(project: str) -> Path:
    """The checkout that SLIME_CHECKOUT or MILES_CHECKOUT names. Skips the test without it."""
    variable = f"{project.upper()}_CHECKOUT"
    folder = os.environ.get(variable)
    if folder is None:
        pytest.skip(f"set {variable} to a checkout of {project}")
    if not Path(folder, project, "rollout").is_dir():
        pytest.skip(f"{variable} {folder} has no {project}/rollout")
    return Path(folder)
