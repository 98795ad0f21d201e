"""What a library of environments provides: a program that runs its environments in another Python environment.

A library is a subclass of `EnvironmentLibrary` (see `miles_async/plugins.py`). Its name is the first part of the
setting `environment`, as in `verifiers:my_taskset`:

    [project.entry-points."miles_async.adapters.environments.libraries"]
    gymnasium = "my_package:Gymnasium"
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from miles_async.plugins import Kind, Plugin


class EnvironmentLibrary(Plugin):
    """A library of environments. It runs in another Python environment, because its packages may exclude those of this
    project."""

    program: ClassVar[Path]
    """The script that serves one environment; `environment_python` runs it with the arguments LIBRARY NAME.

    `adapters/environments/server.py` describes the requests on its standard input and the answers on its standard
    output. The first line of the input is an object with `settings` and `key`.
    """
    setup: ClassVar[str] = ""
    """The command that creates the Python environment; empty if the user creates it."""
    splits: ClassVar[bool] = False
    """Whether its environments have several sets of tasks. A data set names one as environment:SPLIT."""


ENVIRONMENTS = Kind(
    "environment library", EnvironmentLibrary, "miles_async.adapters.environments.libraries", by_path=False
)
