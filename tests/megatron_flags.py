"""Writes the table of Megatron's flags for the installed version of Megatron-core.

    python -m tests.megatron_flags [ARGUMENTS.py]

ARGUMENTS.py is megatron/training/arguments.py of Megatron-LM, of the same version, if the installed package does not
have it. Writes miles_async/config/megatron/VERSION.json, which tests compare with the installed version.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig

FOLDER = Path(__file__).parents[1] / "miles_async" / "config" / "megatron"
CLASSES = {
    "transformer": MLATransformerConfig,
    "optimizer": OptimizerConfig,
    "ddp": DistributedDataParallelConfig,
}


def fields_by_class() -> dict[str, str]:
    """The class, such as `ddp`, of each field of Megatron's configuration. The first class wins."""
    found: dict[str, str] = {}
    for name, kind in CLASSES.items():
        for one in fields(kind):
            found.setdefault(one.name, name)
    return found


def rows(arguments: Any) -> Iterator[tuple[str, list[Any]]]:
    """Each flag with underscores: how many words it takes, its group, and the field that it sets, if any."""
    parser, known = argparse.ArgumentParser(add_help=False, allow_abbrev=False), fields_by_class()
    arguments.add_megatron_arguments(parser)
    for group in parser._action_groups:
        for action in group._group_actions:
            takes = "values" if action.nargs in ("*", "+") else "value"
            if action.nargs == 0:
                takes = "nothing"
            for option in action.option_strings:
                is_off = isinstance(action, argparse._StoreFalseAction) or (
                    isinstance(action, argparse.BooleanOptionalAction) and option.startswith("--no-")
                )
                field = action.dest if action.dest in known else ""
                value = [not is_off] if takes == "nothing" else []
                yield option[2:].replace("-", "_"), [takes, str(group.title), field, *value]


def main() -> None:
    if len(sys.argv) > 1:
        spec = importlib.util.spec_from_file_location("megatron_arguments", sys.argv[1])
        assert spec is not None
        assert spec.loader is not None
        arguments = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(arguments)
    else:
        arguments = importlib.import_module("megatron.training.arguments")
    table = {"fields": fields_by_class(), "flags": dict(sorted(rows(arguments)))}
    text = json.dumps(table, separators=(", ", ": "))
    # One flag, or ten fields, per line.
    text = re.sub(r'(\], |\{)(?="\w+": \[)', r"\1\n", text)
    (FOLDER / f"{version('megatron-core')}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
