"""Makes the files that are too large, or too strange, to be written in a table. Each function fills a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def deep_nesting(folder: Path) -> None:
    """A YAML file with 100,000 open brackets."""
    (folder / "deep.yaml").write_text("data: {reasoning_gym_settings: {a: " + "[" * 100_000 + "}}\n")


BUILDERS: Mapping[str, Callable[[Path], None]] = {function.__name__: function for function in (deep_nesting,)}
