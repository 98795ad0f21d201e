"""Installs a plug-in for a test: a module, and the metadata of a distribution with its entry point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from miles_async.plugins import Kind


def write_package(folder: Path, kind: Kind[Any], name: str, entry_point: str, source: str, package: str) -> Path:
    """Write the module of `entry_point` (`module:Class`) and the metadata of `package`; return the folder of both."""
    return write_plugins(folder, entry_point.partition(":")[0], source, package, (kind, name, entry_point))


def write_plugins(folder: Path, module: str, source: str, package: str, *plugins: tuple[Kind[Any], str, str]) -> Path:
    """Write a package of one module with several plug-ins, each with its kind, its name and its entry point."""
    site = folder / f"site-packages-of-{package}"
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{module}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = (f"[{kind.group}]\n{name} = {entry_point}\n" for kind, name, entry_point in plugins)
    (metadata / "entry_points.txt").write_text("".join(groups))
    return site


def install_plugin(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind[Any],
    name: str,
    entry_point: str,
    source: str,
    package: str = "users",
) -> None:
    """Put a package with one plug-in on the path for the test. The schema of this process does not change."""
    monkeypatch.syspath_prepend(write_package(folder, kind, name, entry_point, source, package))
    # A module of the same name may come from an earlier test.
    monkeypatch.delitem(sys.modules, entry_point.partition(":")[0], raising=False)
    kind.forget()
