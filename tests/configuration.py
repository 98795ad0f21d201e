"""The configuration of a run, as tests write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_async.config.fields import SETTINGS
from miles_async.config.flags import Assignment, parse_flags
from miles_async.config.load import read_assignments, validated
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError, raise_collected

KEYS: Mapping[str, str] = {"input_key": "prompt", "label_key": "label"}
"""The keys of rows as most tests write them."""
KEY_FLAGS = ("--input-key", "prompt", "--label-key", "label")
"""The same on a command line."""


def run_config(*flags: str, **settings: Any) -> RunConfig:
    """A configuration whose other settings have their defaults: `run_config("--no-trace", rollout_batch_size=8)`.

    Settings are named as in `--help`, whatever their section. Values are validated as those of a command line are, so
    that a test raises UserError if a value does not fit.
    """
    parsed = parse_flags(flags)
    if parsed.problems:
        raise UserError("\n".join(parsed.problems))
    assignments = [Assignment(SETTINGS[name].path, value, name) for name, value in settings.items()]
    return build([*parsed.assignments, *assignments])


def build(assignments: Sequence[Assignment]) -> RunConfig:
    """A configuration from assignments; later ones win. Raises UserError with one line per value that is invalid."""
    config, invalid = validated(assignments, [])
    raise_collected(invalid)
    return config


def read_yaml(path: Path) -> list[Assignment]:
    """The assignments in a YAML file. Raises UserError with the file and the keys if the file is invalid."""
    found: list[str] = []
    assignments = read_assignments(path, found)
    raise_collected(found)
    return assignments
