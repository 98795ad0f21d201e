"""The command line: flags made from the schema, then dotted overrides.

Forms:
    --rollout-batch-size 32         also --rollout_batch_size, and --rollout-batch-size=32
    --shuffle-rewards, --no-shuffle-rewards    yes or no
    --rollout-stop END STOP         a list; one YAML text such as "[END, STOP]" works too
    --sglang-mem-fraction-static .8 any SGLang server argument that is no setting of its own
    rollout.rollout_batch_size=32   the same by its place in the YAML; reaches into dicts too
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import yaml

from miles_async.config.fields import SETTINGS, Setting, nearest
from miles_async.config.yaml_text import parse_yaml
from miles_async.errors import UserError

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
_SERVER_ARGS = SETTINGS["sglang_server_args"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value for one setting, or for one key of a setting that is a dict."""

    path: tuple[str, ...]
    value: Any
    source: str
    """Where the person wrote it: a flag, or file and key path."""


@dataclass(slots=True)
class Flags:
    config_files: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    """Flags first, dotted overrides after them, whatever their order on the command line."""
    help: bool = False
    check: bool = False


def parse_flags(argv: Sequence[str]) -> Flags:
    """Raises UserError for the first argument that is unknown, lacks its value or cannot be read."""
    flags, overrides, words = Flags(), [], list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            flags.help = True
        elif word == "--check-config":
            flags.check = True
        elif word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            following = [value] if has_value else _following(words)
            used = _read_flag(name.replace("-", "_"), word, following, flags)
            if not has_value:
                del words[:used]
        elif _OVERRIDE.match(word):
            overrides.append(_read_override(word))
        else:
            raise UserError(f"unexpected argument {word!r}: write --flag value, or section.setting=value")
    flags.assignments += overrides
    return flags


def _following(words: list[str]) -> list[str]:
    """The words up to the next flag or override."""
    end = (n for n, word in enumerate(words) if word.startswith("--") or _is_override(word))
    return words[: next(end, len(words))]


def _is_override(word: str) -> bool:
    """`rollout.lr=1` is one; a value that merely contains `=`, such as a prompt template, is not."""
    if not _OVERRIDE.match(word):
        return False
    first = word.partition("=")[0].partition(".")[0]
    return any(first == setting.path[0] for setting in SETTINGS.values())


def _read_flag(name: str, word: str, following: list[str], flags: Flags) -> int:
    """Note one flag's value; returns how many of the following words it used."""
    flag = word.partition("=")[0]
    if name == "config":
        if not following:
            raise UserError("--config needs a YAML file")
        flags.config_files.append(following[0])
        return 1
    if (setting := SETTINGS.get(name)) is not None:
        value, used = _value(setting, flag, following)
        flags.assignments.append(Assignment(setting.path, value, flag))
        return used
    if name.startswith("no_") and (negated := SETTINGS.get(name[3:])) is not None and bool in negated.kinds:
        if "=" in word:
            raise UserError(f"{flag} takes no value")
        flags.assignments.append(Assignment(negated.path, False, flag))
        return 0
    return _read_server_argument(name, flag, following, flags)


def _read_server_argument(name: str, flag: str, following: list[str], flags: Flags) -> int:
    hint = nearest(flag, [setting.flag for setting in SETTINGS.values()])
    argument = name.removeprefix("sglang_")
    # A near miss of one of our own flags must not end up, unread, in the server's arguments.
    ours = [setting for setting in SETTINGS if setting.startswith("sglang")]
    misspelt = name.startswith("sglang_router") or nearest(name, ours, cutoff=0.85)
    if argument == name or misspelt:
        raise UserError(f"unknown flag {flag}{hint}")
    values = [_yaml(text, flag) for text in following]
    value = True if not values else values[0] if len(values) == 1 else values
    flags.assignments.append(Assignment((*_SERVER_ARGS.path, argument), value, flag))
    return len(following)


def _value(setting: Setting, flag: str, following: list[str]) -> tuple[Any, int]:
    """The setting's value and the number of words it took."""
    if bool in setting.kinds:
        given = bool(following) and following[0].lower() in ("true", "false")
        return (following[0].lower() == "true" if given else True), int(given)
    if not following:
        raise UserError(f"{flag} needs a value: {setting.help}")
    if list in setting.kinds and not (len(following) == 1 and following[0].startswith(("[", "null"))):
        texts = setting.element is str
        return [word if texts else _yaml(word, flag) for word in following], len(following)
    return _scalar(setting, flag, following[0]), 1


def _scalar(setting: Setting, source: str, text: str) -> Any:
    """`text` as YAML; as it stands where the setting is a text, so that 007 and {expression} need no quotes."""
    if str not in setting.kinds:
        return _yaml(text, source)
    if NoneType in setting.kinds and text in ("null", "none", "None", ""):
        return None
    return text


def _read_override(word: str) -> Assignment:
    dotted, _, text = word.partition("=")
    path = tuple(dotted.split("."))
    for setting in SETTINGS.values():
        if setting.path == path:
            value = _yaml(text, dotted) if list in setting.kinds else _scalar(setting, dotted, text)
            return Assignment(path, value, dotted)
        if dict in setting.kinds and path[: len(setting.path)] == setting.path:
            return Assignment(path, _yaml(text, dotted), dotted)
    if (misplaced := SETTINGS.get(path[-1])) is not None:
        raise UserError(f"unknown setting {dotted}; write it as {misplaced.dotted}=")
    raise UserError(f"unknown setting {dotted}{nearest(dotted, [setting.dotted for setting in SETTINGS.values()])}")


def _yaml(text: str, source: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"{source}: {text!r} is not valid YAML: {' '.join(str(error).split())}") from None
