"""Translates the configuration files of ROLL and verl into settings of this project.

Each project has one table (`roll.py`, `verl.py`), and the table has a rule for every key that is accepted. A key sets
one of our settings, or it may only have the value that corresponds to what a run does anyway, or it is refused with the
setting to use instead. No key is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from miles_async.config.translators import roll, verl
from miles_async.config.translators.rules import Translation

Project = Literal["ROLL", "verl"]


def project_of(content: Mapping[str, Any]) -> Project | None:
    """The project whose configuration file has this content; None for a file with our own sections."""
    if roll.recognises(content):
        return "ROLL"
    return "verl" if verl.recognises(content) else None


def translate(content: Mapping[str, Any], project: Project) -> tuple[Translation, list[str]]:
    """Our settings for the content of a file of `project`, and one sentence per key that is refused.

    A key is refused if it is unknown, has no counterpart, or contradicts another key.
    """
    return roll.translate(content) if project == "ROLL" else verl.translate(content)
