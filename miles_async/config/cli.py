"""What an entry script does before anything heavy is imported: help, check, or a configuration that is known to fit."""

from __future__ import annotations

import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from types import NoneType
from typing import NoReturn

from miles_async.config.checks import notes
from miles_async.config.derived import table
from miles_async.config.fields import SECTIONS, SETTINGS, Setting
from miles_async.config.flags import parse_flags
from miles_async.config.load import load_config
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError

REFUSED = 2
"""Exit code for a configuration that cannot run."""


def parse_or_exit(argv: Sequence[str], entry: str) -> RunConfig:
    """The configuration of `entry` (`train_async.py` or `train.py`).

    Exits instead with the help, with the derived table for `--check-config`, or with status 2 and one sentence per
    problem on stderr.
    """
    try:
        flags = parse_flags(argv)
        if flags.help:
            _print_and_exit(help_text(entry))
        with warnings.catch_warnings():
            # Python hides these unless the main module warns; they are meant for the person who typed the flag.
            warnings.simplefilter("default", DeprecationWarning)
            config = load_config(argv, entry=entry)
    except UserError as error:
        for sentence in str(error).splitlines():
            print(f"{entry}: {sentence}", file=sys.stderr)
        sys.exit(REFUSED)
    for note in notes(config, entry):
        print(f"{entry}: note: {note}", file=sys.stderr)
    if flags.check:
        _print_and_exit(table(config, entry))
    return config


def help_text(entry: str) -> str:
    """Every flag, by section, with its default."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [
        f"usage: python {entry} [--config FILE.yaml]... [--flag VALUE]... [section.setting=VALUE]...",
        "",
        "Later sources win: files in order, then flags, then section.setting=VALUE. Values are YAML.",
        "",
        "  --config FILE           a YAML file of settings by section; may be given several times",
        "  --check-config          say what follows from the settings, or what is wrong with them, and exit",
        "  --help                  this",
        "  --sglang-ANYTHING ...   any SGLang server argument that is not listed below",
    ]
    for section in SECTIONS:
        lines += ["", f"{section}:"]
        for setting in SETTINGS.values():
            if ".".join(setting.path[:-1]) == section:
                lines += _flag_help(setting, width)
    return "\n".join(lines)


def _flag_help(setting: Setting, width: int) -> list[str]:
    kinds = "|".join(sorted(kind.__name__.upper() for kind in setting.kinds if kind is not NoneType))
    value = "|".join(setting.choices) or kinds
    flag = f"--[no-]{setting.flag[2:]}" if bool in setting.kinds else f"{setting.flag} {value}"
    default = "unset" if setting.default is None else f"default {setting.default}"
    text = f"{setting.help} ({default})"
    return [f"  {flag}", *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)]


def _print_and_exit(text: str) -> NoReturn:
    print(text)
    sys.exit(0)
