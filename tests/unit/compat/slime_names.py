"""The names of slime and Miles in a test, which are gone afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from miles_async.compat.slime import samples
from miles_async.compat.slime.imports import PROJECTS, install_slime_imports
from miles_async.types import Sample


@contextmanager
def names_of_slime() -> Iterator[None]:
    """The names that `--slime-imports` installs."""
    with forgotten_afterwards():
        install_slime_imports()
        yield


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Forget the names that the test installs."""
    before, members = set(sys.modules), dict(vars(Sample))
    try:
        yield
    finally:
        forget(before)
        for name in vars(samples._Names).keys() - samples._OF_EACH_CLASS:
            if name in members:
                setattr(Sample, name, members[name])
            elif name in vars(Sample):
                delattr(Sample, name)


def forget(before: set[str]) -> None:
    """Forget the modules of other projects, and their examples, that were imported since `before`."""
    for added in sys.modules.keys() - before:
        if added.partition(".")[0] in (*PROJECTS, "examples"):
            del sys.modules[added]


def checkout(project: str) -> Path:
    """The checkout that SLIME_CHECKOUT or MILES_CHECKOUT names. Skips the test without it."""
    variable = f"{project.upper()}_CHECKOUT"
    folder = os.environ.get(variable)
    if folder is None:
        pytest.skip(f"set {variable} to a checkout of {project}")
    if not Path(folder, project, "rollout").is_dir():
        pytest.skip(f"{variable} {folder} has no {project}/rollout")
    return Path(folder)
