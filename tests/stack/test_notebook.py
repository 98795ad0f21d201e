"""The tutorial that is a notebook runs from its first to its last cell, and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.pages import DOCS

NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))


def printed(cell: Any) -> list[str]:
    """The lines that a code cell prints; without numbers if its tag says that they vary."""
    text = "".join(one["text"] for one in cell.get("outputs", []) if one["output_type"] == "stream")
    return (re.sub(r"\d+", "0", text) if "numbers-vary" in cell.metadata.get("tags", []) else text).splitlines()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    shown, executed = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(executed, timeout=None, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert [printed(cell) for cell in executed.cells] == [printed(cell) for cell in shown.cells]
