"""The library `verifiers`; `adapters/environments/server.py` runs its environments."""

from __future__ import annotations

from pathlib import Path

from miles_async.environments import EnvironmentLibrary


class Verifiers(EnvironmentLibrary):
    """Environments of verifiers. NAME is an installed package or a Python file."""

    name = "verifiers"
    program = Path(__file__).parents[1] / "server.py"
    setup = "make setup-verifiers"
