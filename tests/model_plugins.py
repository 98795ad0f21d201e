"""Installs a model plug-in for a test: a module and the metadata of a distribution with its entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miles_async.models.registry import GROUP, find_plugin, has_plugin


def install_plugin(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    entry_point: str,
    source: str,
    package: str = "users",
) -> None:
    """Put the module of `entry_point` (`module:Class`) and the metadata of `package` on the path for the test."""
    site = folder / f"site-packages-of-{package}"
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    module = entry_point.partition(":")[0]
    (site / f"{module}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{model_type} = {entry_point}\n")
    monkeypatch.syspath_prepend(site)
    # A module of the same name may come from an earlier test.
    monkeypatch.delitem(sys.modules, module, raising=False)
    has_plugin.cache_clear()
    find_plugin.cache_clear()
