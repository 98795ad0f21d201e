"""Flags that a function of a user adds to the command line, as Miles lets its functions do:

    def add_arguments(parser): parser.add_argument("--turns", type=int, default=4)
    generate.add_arguments = add_arguments

Each flag, given or not, is an attribute of `args`, like the entries of `custom_args`. An entry of `custom_args` in a
file takes the place of the default, and a flag on the command line that of the entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from miles_async.config.fields import SETTINGS, values_of
from miles_async.config.flags import Assignment, Flags
from miles_async.config.guest_flags import find_flag
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import install_guests, is_defined_here, load_named
from miles_async.errors import UserError, collected
from miles_async.json_values import UnrepresentableError, json_value, shown_error

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

_ASKED = ("rollout_function_path", "custom_generate_function_path")
"""Settings whose functions may add flags: those that Miles asks."""


def take_flags_of_functions(flags: Flags, config: RunConfig) -> bool:
    """Assign the flags that functions of `config` add, and forget that they were unknown.

    Returns whether `flags` has changed. A function that cannot be imported adds none, and is reported elsewhere.
    """
    functions = list(_functions(config))
    if not functions:
        return False
    parser = _parser()
    complaints: list[str] = []
    known = []
    own: dict[str, Any] = {}
    with collected(complaints):
        for name, function in functions:
            _ask(function, name, parser)
        line = [word for words in flags.unknown.values() for word in words]
        found, rest = parser.parse_known_args(line)
        known = [sentence for sentence, (flag, *_) in flags.unknown.items() if flag not in rest]
        # The others have a meaning here, whether or not a function adds them.
        own = {name: one for name, one in vars(found).items() if name not in SETTINGS and find_flag(name) is None}
        # A default gives way to every other source, and a flag only to those that come after it.
        given = _given(parser, line, found)
        later = {assignment.path for assignment in flags.assignments}
        for name in own:
            path = (*SETTINGS["custom_args"].path, name)
            if path not in later and (name in given or name not in config.rollout.custom_args):
                flags.assignments.append(Assignment(path, _plain(name, own[name]), f"the flag of args.{name}"))
    # A flag with an invalid value is not unknown.
    known += [sentence for sentence, (flag, *_) in flags.unknown.items() if any(flag in one for one in complaints)]
    flags.problems[:] = [*(sentence for sentence in flags.problems if sentence not in known), *complaints]
    return bool(own or complaints)


def _parser() -> ArgumentParser:
    # Most runs have no such function, and start without this module.
    from argparse import ArgumentParser

    class Parser(ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message}: correct the flags of your function")

    return Parser(add_help=False, allow_abbrev=False, conflict_handler="resolve")


def _given(parser: ArgumentParser, line: Sequence[str], found: Namespace) -> set[str]:
    """The names in `found` that the command line sets. The others have their defaults."""
    # argparse does not replace attributes that a namespace has by defaults.
    without_defaults, _ = parser.parse_known_args(line, type(found)(**dict.fromkeys(vars(found))))
    return {name for name, value in vars(without_defaults).items() if value is not None}


def _functions(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """The functions that may add flags, with the setting and the path of each."""
    paths = {setting: SETTINGS[setting].value(config) for setting in _ASKED}
    named = {setting: path for setting, path in paths.items() if path is not None and not is_defined_here(path)}
    if named:
        install_guests(values_of(config))
    loaded: list[tuple[str, Any]] = []
    for setting, path in named.items():
        with collected([]):
            loaded.append((f"{setting} {path!r}", load_named(path, setting=setting)))
    return ((name, function) for name, function in loaded if hasattr(function, "add_arguments"))


def _plain(name: str, value: Any) -> Any:
    """The value as every process of a run reads it. Raises UserError if the run cannot store it."""
    try:
        return json_value(value)
    except UnrepresentableError as error:
        raise UserError(f"args.{name}, which a function adds, cannot be stored: {error}") from None


def _ask(function: Any, name: str, parser: ArgumentParser) -> None:
    try:
        function.add_arguments(parser)
    except Exception as error:
        raise UserError(f"{name}: its add_arguments failed: {shown_error(error)}") from error
