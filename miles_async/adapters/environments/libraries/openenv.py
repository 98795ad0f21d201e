"""The library `openenv`; `adapters/environments/server.py` runs its environments."""

from __future__ import annotations

from pathlib import Path

from miles_async.environments import EnvironmentLibrary


class OpenEnv(EnvironmentLibrary):
    """Environments of OpenEnv. NAME is an installed package, a Python file or the URL of a server."""

    name = "openenv"
    program = Path(__file__).parents[1] / "server.py"
    setup = "make setup-openenv"
