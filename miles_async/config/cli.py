"""The first step of every entry point: `--help`, `--check-config`, or a checked configuration.

Nothing heavy is imported here, so help and refusals appear in less than a second.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from miles_async.config import presets
from miles_async.config.checks import notes
from miles_async.config.checks.notes import lost_model
from miles_async.config.fields import SECTIONS, SETTINGS, Setting
from miles_async.config.flags import Flags, parse_flags
from miles_async.config.function_flags import take_flags_of_functions
from miles_async.config.guest_flags import guest_help
from miles_async.config.load import checked_config, config_of_values, translation_table, without_consequences
from miles_async.config.schema import RunConfig
from miles_async.config.suggest import suggestion
from miles_async.config.table import TableRow, table
from miles_async.config.user_functions import check_functions
from miles_async.errors import UserError, collected, raise_collected
from miles_async.observability.output import protect_output

EXIT_INVALID = 2
"""Exit code for an invalid configuration."""


ReadFiles = Callable[[RunConfig, bool], list[TableRow]]
"""`read_files(config, full)` returns what the files of a run contain, and raises UserError with their problems."""


def parse_or_exit(
    argv: Sequence[str], entry: str, command: str | None = None, read_files: ReadFiles | None = None
) -> RunConfig:
    """The checked configuration of a run, or exit.

    `entry` is `train_async.py` or `train.py` and determines the schedule. `command` is what the user typed to start the
    program, such as `miles-async train`, for usage and messages; it defaults to the script. `read_files` reads the
    files of the run for `--check-config`. Exits with status 0 after printing the help or, for `--check-config`, the
    derived values; exits with status 2 after printing one sentence per problem to stderr.
    """
    protect_output()
    program = command or entry
    flags = parse_flags(argv)
    if flags.help:
        _print_and_exit(help_text(command or f"python {entry}"))
    try:
        if flags.help_of is not None:
            _print_and_exit(guest_help(flags.help_of))
        if flags.model is not None or flags.gpus is not None:
            _print_and_exit(_suggested(flags))
    except UserError as error:
        _refuse_and_exit(str(error).splitlines(), program)
    with warnings.catch_warnings():
        # Python hides deprecation warnings outside of the main module, but the user who typed the flag needs them.
        warnings.simplefilter("default", DeprecationWarning)
        config, found = checked_config(flags, entry=entry)
        if take_flags_of_functions(flags, config):
            flags.notes.clear()
            config, found = checked_config(flags, entry=entry)
    if found or flags.check:
        # The preflight of a run checks the functions again. After a refusal there is none.
        with collected(found):
            check_functions(config)
    read = read_rows(config, flags, read_files, found) if flags.check and read_files is not None else []
    if found:
        _refuse_and_exit(found, program)
    noted = config if flags.preset is None else presets.without_idle(config, flags.preset)
    for note in [*flags.notes, *notes(noted, entry), *lost_model(config), *_idle_notes(flags)]:
        print(f"{program}: note: {note}", file=sys.stderr)
    if flags.check:
        preset = [] if flags.preset is None else [presets.described(flags.preset)]
        translations = [text for path in flags.config_files if (text := translation_table(Path(path))) is not None]
        _print_and_exit("\n".join([*preset, *translations, table(config, entry, read)]))
    return config


def read_rows(config: RunConfig, flags: Flags, read_files: ReadFiles, found: list[str]) -> list[TableRow]:
    """What the files of the run contain. Adds their problems to `found`, except those that follow from others."""
    problems: list[str] = []
    rows: list[TableRow] = []
    with collected(problems):
        # A function that cannot be imported is a problem that is already known.
        rows = read_files(config, flags.check_fully and not found)
    found += without_consequences(problems, found)
    return rows


def _idle_notes(flags: Flags) -> list[str]:
    """What the run ignores of another project's command line, with the reasons if the command line is only checked."""
    if flags.check:
        return [f"{flag} {why}" for flag, why in flags.idle.items()]
    if not flags.idle:
        return []
    return [f"{', '.join(flags.idle)} have no effect here; --check-config says why"]


def _suggested(flags: Flags) -> str:
    """A layout for the model. The other settings need not make up a complete run. Raises UserError if there is none."""
    raise_collected(flags.problems)
    if flags.model is None or flags.gpus is None:
        raise UserError("--suggest-layout MODEL and --gpus N belong together: set both")
    config, found = config_of_values(flags)
    raise_collected(found)
    return suggestion(config, flags.gpus)


def help_text(command: str) -> str:
    """The usage of `command` and every flag, grouped by section, with its default."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [
        f"usage: {command} [--config FILE.yaml]... [--flag VALUE]... [section.setting=VALUE]...",
        "",
        "Values are YAML 1.2. Later sources override earlier ones: the preset, the files in order, flags, and dotted",
        "overrides (section.setting=VALUE).",
        "",
        "  --config FILE           YAML file of settings, grouped by section; may be given several times",
        "  --preset PROJECT        use the defaults of another project, such as slime",
        "  --check-config [full]   check settings, user functions, the first rows of data and the checkpoint to load,",
        "                          print derived values, and exit; full also rewards an empty answer to the first row",
        "  --suggest-layout MODEL --gpus N",
        "                          print settings of devices and layout with which a checkpoint trains on N GPUs of",
        "                          --gpu-memory-gib, and exit",
        "  --help                  print this help and exit",
        "  --help-slime, --help-miles, --help-megatron",
        "                          print what flags of slime, Miles and Megatron-LM mean here, and exit",
        "  --sglang-NAME VALUE     set any SGLang server argument without a flag below",
        "  --sglang-router-NAME VALUE",
        "                          set any sglang-router argument without a flag below; also --router-NAME",
    ]
    for section, about in SECTIONS.items():
        lines += ["", f"{section}:", *_wrapped(about, width, indent=2), ""]
        for setting in SETTINGS.values():
            if ".".join(setting.path[:-1]) == section:
                lines += _flag_help(setting, width)
    return "\n".join(lines)


def _flag_help(setting: Setting, width: int) -> list[str]:
    types = "|".join(sorted(kind.__name__.upper() for kind in setting.kinds if kind is not NoneType))
    value = "|".join(setting.choices) or types
    flag = f"--[no-]{setting.flag[2:]}" if bool in setting.kinds else f"{setting.flag} {value}"
    text = f"{setting.help} ({_default(setting.default)})"
    return [f"  {flag}", *_wrapped(text, width, indent=8)]


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def _default(value: Any) -> str:
    match value:
        case None:
            return "unset by default"
        case bool():
            return f"default {'on' if value else 'off'}"
        case tuple():
            return f"default {list(value)}"
        case _:
            return f"default {value}"


def _print_and_exit(text: str) -> NoReturn:
    print(text)
    sys.exit(0)


def _refuse_and_exit(sentences: Sequence[str], program: str) -> NoReturn:
    for sentence in sentences:
        print(f"{program}: {sentence}", file=sys.stderr)
    sys.exit(EXIT_INVALID)
