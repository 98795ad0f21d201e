"""The library `roll`; `adapters/environments/server.py` runs its environments."""

from __future__ import annotations

from pathlib import Path

from miles_async.environments import EnvironmentLibrary


class Roll(EnvironmentLibrary):
    """Environments of ROLL, and others that are registered with gem. NAME is the module or Python file that registers
    them, such as roll.pipeline.agentic.env."""

    name = "roll"
    program = Path(__file__).parents[1] / "server.py"
    setup = "make setup-roll ROLL=FOLDER"
    splits = True
