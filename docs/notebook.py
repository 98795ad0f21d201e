"""Writes the pages of notebooks: Markdown cells as they are, code cells with their output. MkDocs calls `on_files`.

`python docs/notebook.py NOTEBOOK` executes a notebook and stores what it prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            name = file.src_uri.removesuffix(".ipynb")
            files.append(File.generated(config, f"{name}.md", content=page(json.loads(file.content_string))))
    return files


def page(notebook: dict[str, Any]) -> str:
    """The page of a notebook, as Markdown."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    if printed := output(cell):
        yield f"```\n{printed}```"


def output(cell: dict[str, Any]) -> str:
    """What a code cell has printed."""
    return "".join("".join(one["text"]) for one in cell["outputs"] if one["output_type"] == "stream")


def execute(path: str) -> None:
    """Execute a notebook, and replace its output in the file."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    # Times of cells would change the file each time.
    NotebookClient(notebook, timeout=None, record_timing=False).execute()
    for cell in notebook.cells:
        cell.update({"execution_count": None} if cell.cell_type == "code" else {})
    nbformat.write(notebook, path)


if __name__ == "__main__":
    execute(sys.argv[1])
