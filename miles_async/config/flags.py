"""The command line: one flag per setting of the schema, and dotted overrides.

    --rollout-batch-size 32                   also --rollout_batch_size 32 and --rollout-batch-size=32
    --shuffle-rewards, --no-shuffle-rewards   turn a switch on and off
    --rollout-stop END STOP                   a list; YAML such as "[END, STOP]" works too
    --sglang-mem-fraction-static 0.8          any SGLang server argument without a flag here
    --sglang-router-queue-size 200            any sglang-router argument without a flag here; also --router-queue-size
    rollout.rollout_batch_size=32             a setting by its YAML path; also reaches keys of a dict
    trainer.nnodes=2, +data.x=1, ~data.x      a key of another project, as Hydra adds and removes it
    skip.reward.enable=true                   a setting of a user-defined skip role

argparse is not used because `parse_known_args` returns unknown flags and stray words in one list without their
positions, so a stray word would silently become the value of an unrelated `--sglang-…` flag. pydantic-settings parses
command lines with argparse.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain, takewhile
from typing import Any

from miles_async.config.fields import BY_PATH, SECTIONS, SETTINGS, SKIP_ROLES, Setting, is_skip_role, nearest
from miles_async.config.guest_flags import GuestFlags, aliased, find_flag, flags_of_guests, value_of
from miles_async.config.translation import Outcome, Translation, translate
from miles_async.config.yaml_text import YAMLError, parse_yaml, plain_yaml
from miles_async.errors import UserError
from miles_async.guests import GUESTS

_OVERRIDE = re.compile(r"(?:\+{0,2}|~)[A-Za-z_][\w.@/-]*=|~[A-Za-z_]")
_SERVER_ARGS = SETTINGS["sglang_server_args"]
_ROUTER_ARGS = SETTINGS["sglang_router_args"]
PASSED_ON = {"sglang_router_": _ROUTER_ARGS, "router_": _ROUTER_ARGS, "sglang_": _SERVER_ARGS}
"""Prefixes of flags whose names SGLang or sglang-router define, and the settings that collect these arguments."""
_NOTHING_TO_REMOVE = "has no effect: nothing before it sets this key"
_ADDED_UP = ("rollout_sample_hook_path",)
"""Settings whose flag may be given several times, as in slime: the values add up."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value for one setting, or for one key of a setting that is a dict."""

    path: tuple[str, ...]
    """Sections and field, followed by the key if the setting is a dict."""
    value: Any
    source: str
    """Where the user wrote the value, for error messages: the flag, or the file and the path in it."""


class UnknownFlagError(UserError):
    """No project has this flag, but a function of the user may add it."""


@dataclass(slots=True)
class Flags:
    """A parsed command line."""

    config_files: list[str] = field(default_factory=list)
    preset: str | None = None
    """The project whose defaults apply wherever nothing else sets a value."""
    assignments: list[Assignment] = field(default_factory=list)
    """Flags first, then dotted overrides, independent of their order on the command line."""
    help: bool = False
    help_of: str | None = None
    """The project whose flags are to be explained, such as `slime` of `--help-slime`."""
    check: bool = False
    check_fully: bool = False
    """Whether `--check-config full` also calls reward functions."""
    model: str | None = None
    """The model of `--suggest-layout`; None if no layout is asked for."""
    gpus: int | None = None
    """The number of GPUs for `--suggest-layout`."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each argument that is unknown, lacks a value or is not valid YAML."""
    unknown: dict[str, list[str]] = field(default_factory=dict)
    """The words of each flag that is unknown, by its sentence in `problems`: the flag and what follows it."""
    idle: dict[str, str] = field(default_factory=dict)
    """Arguments of other projects that have no effect here, each with the reason."""
    notes: list[str] = field(default_factory=list)
    """One sentence for each valid value that another value takes the place of."""
    guests: GuestFlags = field(default_factory=GuestFlags)


def parse_flags(argv: Sequence[str]) -> Flags:
    """Parse a command line without checking the values against the schema."""
    flags, words = Flags(), list(argv)
    overrides: list[Assignment] = []
    theirs: dict[str, dict[str, Any]] = {}
    while words:
        word = words.pop(0)
        values: list[str] = []
        try:
            values = list(takewhile(_is_value, words))
            if word in ("-h", "--help"):
                flags.help = True
            elif word.partition("=")[0] == "--check-config":
                del words[: _read_check(flags, word, values)]
            elif word.startswith("--help-"):
                flags.help_of = word.removeprefix("--help-")
            elif word.partition("=")[0].removeprefix("--").strip("-") and word.startswith("--"):
                del words[: _read_flag(flags, word, values)]
            elif _OVERRIDE.match(word):
                _read_override(flags, word, overrides, theirs, argv)
            else:
                raise UserError(_unexpected(word))
        except UserError as error:
            flags.problems += str(error).splitlines()
            if isinstance(error, UnknownFlagError):
                flags.unknown[str(error)] = [word, *values]
            # The words that follow belong to the same mistake, such as a value with blanks.
            del words[: len(values)]
    of_guests: list[Assignment] = []
    of_files: list[Assignment] = []
    turned_off: dict[str, str] = {}
    for outcome in flags.guests.outcomes():
        _take(flags, outcome, of_guests)
        of_files += _assignments(outcome.over_flags)
        turned_off |= outcome.turned_off
    flags.idle |= _replaced([*flags.assignments, *of_guests], of_files, turned_off)
    of_guests = [one for one in of_guests if one.source not in turned_off]
    flags.problems += _contradictions(flags, of_guests)
    flags.assignments += [*of_guests, *of_files]
    for project, content in theirs.items():
        _take(flags, translate(content, project), flags.assignments)
    flags.assignments += overrides
    return flags


def _take(flags: Flags, outcome: Outcome, assignments: list[Assignment]) -> None:
    """Add what arguments of another project mean to `flags`, and the settings to `assignments`."""
    flags.problems += outcome.problems
    flags.idle |= outcome.idle
    assignments += _assignments(outcome.translation)


def _assignments(translation: Translation) -> Iterator[Assignment]:
    for dotted, ours in translation.items():
        yield Assignment(tuple(dotted.split(".")), ours.value, ours.key)


def _replaced(
    of_flags: Iterable[Assignment], of_files: Iterable[Assignment], turned_off: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The flags whose values those of a file take the place of, each with the reason."""
    files = {one.path: one for one in of_files}
    for one in of_flags:
        other = files.get(one.path)
        if one.source in turned_off:
            yield one.source, f"has no effect, because {turned_off[one.source]} turns it off"
        elif other is not None and other.value != one.value:
            yield one.source, f"has no effect, because {other.source} sets {'.'.join(one.path)}, too"


def _contradictions(flags: Flags, of_guests: Sequence[Assignment]) -> Iterator[str]:
    """One sentence for each flag of another project that sets a setting to another value than another flag does.

    `of_guests` are the settings of flags that are not just another name of one setting. The last value of a repeated
    flag counts.
    """
    aliases = [one for one in flags.assignments if one.source in flags.guests.aliases]
    others = {*flags.guests.aliases, "--suggest-layout"}
    first = {one.path: one for one in flags.assignments if one.source not in others}
    for theirs in {(one.path, one.source.replace("_", "-")): one for one in (*aliases, *of_guests)}.values():
        other = first.setdefault(theirs.path, theirs)
        if theirs.value != other.value and str(theirs.value) != str(other.value):
            yield (
                f"{theirs.source} and {other.source} contradict each other, because both set {'.'.join(theirs.path)}: "
                "remove one of them"
            )


def _read_flag(flags: Flags, word: str, values: Sequence[str]) -> int:
    """Add what a flag says to `flags`. Returns how many of `values`, the words after the flag, belong to it."""
    flag, equals, text = word.partition("=")
    if equals:
        values = [text]
    if flag == "--help":
        raise UserError(f"{flag} does not take the value {text!r}: remove the value")
    if flag in ("--suggest-layout", "--gpus"):
        _read_suggestion(flags, flag, values)
        used = 1
    elif flag == "--preset":
        _read_preset(flags, values)
        used = 1
    elif flag == "--config":
        if not values or not values[0]:
            raise UserError("--config needs a YAML file")
        flags.config_files.append(os.path.expanduser(values[0]))
        used = 1
    else:
        used = _read_setting(flags, flag, list(values))
        if equals and not used:
            raise UserError(_not_a_switch(flag, text))
    return 0 if equals else used


def _read_check(flags: Flags, word: str, values: Sequence[str]) -> int:
    """Returns how many of `values`, the words after the flag, belong to it."""
    _, equals, text = word.partition("=")
    if equals and text != "full":
        raise UserError(f"--check-config does not take the value {text!r}: remove the value, or write full")
    follows = not equals and values[:1] == ["full"]
    flags.check, flags.check_fully = True, bool(equals) or follows
    return int(follows)


def _read_preset(flags: Flags, values: Sequence[str]) -> None:
    if not values or not values[0]:
        raise UserError("--preset needs the name of a project, such as slime")
    first, flags.preset = flags.preset, values[0].lower()
    if first is not None:
        flags.preset = None
        raise UserError(f"--preset {first} and --preset {values[0]:.80} exclude each other: choose one")


def _read_suggestion(flags: Flags, flag: str, values: Sequence[str]) -> None:
    if not values or not values[0]:
        needed = "the folder of a checkpoint" if flag == "--suggest-layout" else "a number of GPUs, such as 8"
        raise UserError(f"{flag} needs {needed}")
    if flag == "--suggest-layout":
        flags.model = values[0]
        flags.assignments.append(Assignment(SETTINGS["hf_checkpoint"].path, values[0], flag))
    elif not values[0].isdecimal() or not 2 <= int(values[0]) <= 65_536:
        raise UserError(f"--gpus {values[0]!r:.80} is not a number of GPUs: set it to 2 or more")
    else:
        flags.gpus = int(values[0])


def _not_a_switch(flag: str, text: str) -> str:
    name = flag[2:].replace("_", "-").removeprefix("no-")
    sentence = f"{flag} does not take the value {text!r}"
    if not (_is_flag(name) and _is_flag(f"no-{name}")):
        return f"{sentence}: write {flag} without a value, or remove it"
    return f"{sentence}: write --{name} to turn it on, or --no-{name} to turn it off"


def _is_flag(name: str) -> bool:
    """Whether a flag of this name exists here or in another project."""
    name = name.replace("-", "_")
    switched = SETTINGS.get(name.removeprefix("no_"))
    return (switched is not None and bool in switched.kinds) or find_flag(name) is not None


def _is_value(word: str) -> bool:
    """Whether a word after a flag belongs to the flag, rather than being the next flag or an override.

    A text that merely contains `=`, such as a prompt template, is a value: an override starts with the name of a
    section, or with a key of another project.
    """
    if word.startswith("--"):
        return False
    _, key, _ = _parts(word)
    section = key.partition(".")[0]
    if not _OVERRIDE.match(word):
        return True
    return not any(section == setting.path[0] for setting in SETTINGS.values()) and _project_with(key) is None


def _project_with(key: str) -> str | None:
    """The project whose key an override has; None if no project has it."""
    answers = GUESTS.ask("recognise a key", lambda guest: guest.has_key(key))
    return next((name for name, has_key in answers.items() if has_key), None)


def _read_setting(flags: Flags, flag: str, values: list[str]) -> int:
    """Add what a flag sets to `flags`. Returns how many of `values`, the words after the flag, it uses."""
    name = flag[2:].replace("-", "_")
    setting, found = SETTINGS.get(name), None
    if setting is None:
        negated = SETTINGS.get(name.removeprefix("no_"))
        if negated is not None and bool in negated.kinds:
            flags.assignments.append(Assignment(negated.path, False, flag))
            return 0
        if (found := find_flag(name)) is None:
            flags.assignments.append(_parse_server_argument(name, flag, values))
            return len(values)
        setting = aliased(found[1])
    if setting is not None:
        value, used = _setting_value(setting, flag, values)
        if found is not None:
            flags.guests.aliases.add(flag)
        if setting.name in _ADDED_UP and isinstance(value, list):
            earlier = [one.value for one in flags.assignments if one.path == setting.path]
            value = [*(earlier[-1] if earlier else []), *value]
        flags.assignments.append(Assignment(setting.path, value, flag))
    else:
        assert found is not None
        value, used = value_of(found[1], flag, values)
        flags.guests.add(found[0], name, value)
    return used


def _setting_value(setting: Setting, flag: str, values: list[str]) -> tuple[Any, int]:
    if bool in setting.kinds:
        if values and values[0].lower() in ("yes", "no", "on", "off", "1", "0"):
            raise UserError(_not_a_switch(flag, values[0]))
        explicit = bool(values) and values[0].lower() in ("true", "false")
        return (values[0].lower() == "true" if explicit else True), int(explicit)
    if not values:
        raise UserError(f"{flag} needs a value: {setting.help}")
    if list in setting.kinds and not ((len(values) == 1 and values[0].startswith("[")) or values == ["null"]):
        return [text if setting.element is str else _yaml(text, flag) for text in values], len(values)
    if list in setting.kinds and setting.element is str and _yaml(values[0], flag) == [values[0][1:-1]]:
        text = values[0]
        raise UserError(f"{flag} {text} may be a text or a list: write '[\"{text}\"]' or '[\"{text[1:-1]}\"]'")
    return _scalar(setting, flag, values[0]), 1


def _parse_server_argument(name: str, flag: str, values: list[str]) -> Assignment:
    prefix = next((prefix for prefix in PASSED_ON if name.startswith(prefix)), None)
    own_flags = [setting for setting in SETTINGS if setting.startswith("sglang")]
    # A misspelt flag of this program must not be passed on to SGLang unread.
    if prefix is None or nearest(name, own_flags, cutoff=0.85):
        known = [*(setting.flag for setting in SETTINGS.values()), *flags_of_guests()]
        similar = nearest(flag, known, cutoff=0.7) or nearest(flag.partition(" ")[0], known, cutoff=0.7)
        raise UnknownFlagError(f"unknown flag {flag:.80}{similar or '; --help lists all flags'}")
    if not name.removeprefix(prefix):
        raise UserError(f"{flag} needs the name of an argument, as in --sglang-mem-fraction-static 0.8")
    parsed = [_yaml(text, flag) for text in values]
    value = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return Assignment((*PASSED_ON[prefix].path, name.removeprefix(prefix)), value, flag)


def _read_override(
    flags: Flags,
    word: str,
    overrides: list[Assignment],
    theirs: dict[str, dict[str, Any]],
    line: Sequence[str],
) -> None:
    """Add the assignment of `section.setting=value` to `overrides`, or a key of another project and its value to those
    of the project in `theirs`. `line` is the whole command line.

    As in Hydra, `+` and `++` before a key change nothing about its value, `~` removes what was set before, and the last
    value of a key counts.
    """
    signs, key, text = _parts(word)
    # Other projects are asked only if need be, because that imports their tables.
    project = None if _is_setting(key) and not signs else _project_with(key)
    if _is_setting(key) and (project is not None or not signs):
        # A key that both projects have is a setting, but may have a sign.
        removed = [one for one in overrides if one.path == tuple(key.split("."))] if "~" in signs else []
        for one in removed:
            overrides.remove(one)
        if "~" not in signs:
            overrides.append(_parse_override(f"{key}={text}"))
        elif not removed:
            flags.idle[word] = _NOTHING_TO_REMOVE
        return
    if project is None and not _is_setting(key):
        project = _project_meant(key, signs, line)
    if project is None and signs:
        raise UserError(_unexpected(word))
    if project is None:
        overrides.append(_parse_override(word))
        return
    values = theirs.setdefault(project, {})
    known = [each for each in values if each == key or each.startswith(f"{key}.")]
    for each in known:
        del values[each]
    if "~" not in signs:
        values[key] = plain_yaml(text)  # texts of Hydra need fewer quotes than those of YAML
    elif not known:
        flags.idle[word] = _NOTHING_TO_REMOVE


def _parts(word: str) -> tuple[str, str, str]:
    """The signs of Hydra before a key, the key, and the text of its value."""
    key, _, text = word.partition("=")
    return key[: len(key) - len(key.lstrip("+~"))], key.lstrip("+~"), text


def _is_setting(key: str) -> bool:
    return tuple(key.split(".")) in BY_PATH


def _projects_of(words: Sequence[str]) -> Set[str]:
    """The projects whose keys a command line has, other than names of settings."""
    keys = [_parts(word)[1] for word in words if _OVERRIDE.match(word)]
    return {project for key in keys if not _is_setting(key) and (project := _project_with(key)) is not None}


def _project_meant(key: str, signs: str, line: Sequence[str]) -> str | None:
    """The project to which a key that no project has belongs, by its section; None if it rather is a setting.

    A key without a sign belongs to a project only if the command line has other keys of that project.
    """
    path, section = tuple(key.split(".")), key.partition(".")[0]
    if not signs and (key.rstrip(".") in SECTIONS or path[-1] in SETTINGS or _is_below_a_dict(path)):
        return None
    ours = [setting.dotted for setting in SETTINGS.values()]
    projects = _projects_of(line)
    for project, keys in _keys_of_guests().items():
        is_theirs = any(each.startswith(f"{section}.") for each in keys)
        if (signs and is_theirs) or (project in projects and (is_theirs or section not in SECTIONS)):
            closest = get_close_matches(key, [*keys, *ours], n=1, cutoff=0.85)
            return None if closest and closest[0] not in keys else project
    return None


def _keys_of_guests() -> Mapping[str, Collection[str]]:
    return GUESTS.ask("name its keys", lambda guest: frozenset(guest.keys()))


def _is_below_a_dict(path: tuple[str, ...]) -> bool:
    """Whether a path is that of a key of a setting that is a dict, or of a skip role."""
    within = (BY_PATH.get(path[:end]) for end in range(1, len(path)))
    return any(setting is not None and dict in setting.kinds for setting in within) or is_skip_role(path)


def _unexpected(word: str) -> str:
    return f"unexpected argument {word!r}: write --flag value, or section.setting=value"


def _parse_override(word: str) -> Assignment:
    """The assignment of `section.setting=value`."""
    dotted, _, text = word.partition("=")
    path = tuple(dotted.split("."))
    for setting in SETTINGS.values():
        if setting.path == path:
            value = _yaml(text, dotted) if list in setting.kinds else _scalar(setting, dotted, text)
            return Assignment(path, value, dotted)
        if dict in setting.kinds and path[: len(setting.path)] == setting.path:
            return Assignment(path, _yaml(text, dotted), dotted)
    if len(path) == 3 and is_skip_role(path):
        return Assignment((*SKIP_ROLES, *path[1:]), _yaml(text, dotted), dotted)
    if (misplaced := SETTINGS.get(path[-1])) is not None:
        raise UserError(f"unknown setting {dotted}; write it as {misplaced.dotted}=")
    if (section := dotted.rstrip(".")) in SECTIONS:
        raise UserError(f"{section} is a section: write {section}.setting=value")
    known = [*(setting.dotted for setting in SETTINGS.values()), *chain(*_keys_of_guests().values())]
    similar = nearest(dotted, known)
    raise UserError(f"unknown setting {dotted}{similar or '; --help lists all settings'}")


def _scalar(setting: Setting, source: str, text: str) -> Any:
    """The value of `text`: YAML, or the text itself if the setting is a string, so `007` needs no quotes."""
    return text if str in setting.kinds else _yaml(text, source)


def _yaml(text: str, source: str) -> Any:
    try:
        return parse_yaml(text)
    except YAMLError as error:
        raise UserError(f"{source}: {text!r:.80} is not valid YAML: {' '.join(str(error).split())}") from None
