"""Translates configuration files and command lines of other projects.

`Translator` does so with a table, which has a rule for every key that is accepted. A key sets one of our settings, or
it may only have the value that corresponds to what a run does anyway, or it has no effect here, which is said, or it is
refused with the setting to use instead. No key is ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_async.config.fields import BY_PATH, SECTIONS, nearest
from miles_async.guests import GUESTS
from miles_async.plugins import errors_of


@dataclass(frozen=True, slots=True)
class Sets:
    """The key sets our settings, each to the same value."""

    settings: tuple[str, ...]
    """Dotted paths. A path below a setting that is a dict, such as `engine.sglang_server_args.page_size`, sets one key
    of the dict."""
    values: Mapping[Any, Any] | None = None
    """Our value for each valid value of the key; None if the values are the same."""


@dataclass(frozen=True, slots=True)
class Only:
    """The key needs no setting, but may only have the values that correspond to what a run does anyway."""

    values: tuple[Any, ...]
    instead: str
    """What the run does, and which setting changes it, for the error message."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The key has no counterpart."""

    instead: str
    """What to set instead."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The key has no effect here."""

    why: str
    """The end of a sentence that begins with the key, such as `belongs to the training loop of Megatron-LM`."""
    values: tuple[Any, ...] = ()
    """The values that the key may have; empty if any value is accepted."""


@dataclass(frozen=True, slots=True)
class Combined:
    """The key determines our settings together with other keys, so the module of the project computes them."""

    does: str = "sets settings together with other flags"
    """What the key does, as the rest of a sentence, for the documentation."""
    kind: Literal["mapped", "compared"] = "mapped"
    """Whether the key sets anything, or is only compared with other keys."""


Rule = Sets | Only | Refused | Idle | Combined
Table = Mapping[str, Rule]
"""The rules of a project by dotted key. A rule may also be for a section, if it applies to everything in it."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of another project's command line."""

    rule: Rule
    takes: Literal["nothing", "option", "value", "values"] = "value"
    """How many words follow the flag. A flag that takes nothing, or an option that is left out, has the value true."""


@dataclass(frozen=True, slots=True)
class Translated:
    """The value of one of our settings."""

    value: Any
    key: str
    """The key, or keys, of the other project that determine the value."""


Translation = dict[str, Translated]
"""Our settings by dotted path."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the keys of another project mean here."""

    translation: Translation = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """One sentence for each key that is refused."""
    idle: dict[str, str] = field(default_factory=dict)
    """The keys that have no effect here, each with the reason, as in `Idle`."""
    over_flags: Translation = field(default_factory=dict)
    """What a file sets that a flag names, and that takes precedence over all flags."""
    turned_off: dict[str, str] = field(default_factory=dict)
    """The switches that the keys of such a file turn off, each with the key."""


def project_of(content: Mapping[str, Any]) -> str | None:
    """The project whose configuration file has this content; None for a file with our own sections.

    Raises UserError if a user's guest fails, like `translate`.
    """
    answers = GUESTS.ask("recognise a configuration file", lambda guest: guest.recognises(content))
    return next((name for name, recognised in answers.items() if recognised), None)


def translate(content: Mapping[str, Any], project: str) -> Outcome:
    """What the content of a file of `project` means here."""
    guest = GUESTS.find(project)
    with errors_of(guest, "translate settings"):
        found = guest.translate(content)
        translation = {name: Translated(entry.value, entry.key) for name, entry in found.translation.items()}
        return Outcome(translation=translation, problems=list(found.problems), idle=dict(found.idle))


def sets(*settings: str) -> Sets:
    """A key whose value one or several settings take over."""
    return Sets(settings)


def converts(setting: str, values: Mapping[Any, Any]) -> Sets:
    """A key whose values have other names here."""
    return Sets((setting,), values)


def entries(section: Mapping[str, Any], table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a file. A value is not divided further if the table has a rule for it.

    Empty sections have no entries if the table has keys below them.
    """
    for name, value in section.items():
        key = f"{prefix}{name}"
        if key in table:
            yield key, value
        elif isinstance(value, Mapping) and value:
            yield from entries(value, table, f"{key}.")
        elif value not in (None, {}) or not any(known.startswith(f"{key}.") for known in table):
            yield key, value


@dataclass(slots=True)
class Translator(Outcome):
    """Applies the rules of a table to the entries of a file, and collects every problem."""

    project: str
    table: Table

    def apply(self, key: str, value: Any) -> None:
        """Follow the rule of a key of the file."""
        rule = self.table.get(key)
        if rule is None:
            self.problems.append(self._unknown(key))
        else:
            self.follow(rule, key, value)

    def follow(self, rule: Rule, key: str, value: Any) -> None:
        """Do with a key what its rule says: set our settings, or report a problem."""
        match rule:
            case Sets(settings, None):
                for setting in settings:
                    self.set(setting, value, key)
            case Sets(settings, values) if values is not None:
                ours = [our for their, our in values.items() if _same(their, value)]
                if not ours:
                    valid = " or ".join(str(their) for their in values)
                    names = " and ".join(settings)
                    self.problems.append(f"{key} {value!r} has no counterpart: set it to {valid}, or set {names}")
                for setting in settings if ours else ():
                    self.set(setting, ours[0], key)
            case Only(values, instead) if not any(_same(value, valid) for valid in values):
                self.problems.append(f"{key} {value!r} is not supported: {instead}")
            case Refused(instead):
                self.problems.append(f"{key} has no counterpart: {instead}")
            case Idle(why, values) if not values or any(_same(value, valid) for valid in values):
                self.idle[key] = why
            case Idle(_, values):
                valid = " or ".join(str(each) for each in values if each is not True)
                self.problems.append(f"{key} does not take the value {value!r}: set it to {valid}, or remove the value")

    def set(self, setting: str, value: Any, key: str) -> None:
        """Set one of our settings. Two keys may set it only to the same value."""
        earlier = self.translation.get(setting)
        if earlier is not None and earlier.value != value:
            self.problems.append(
                f"{earlier.key} {earlier.value!r} and {key} {value!r} contradict each other, because both set "
                f"{setting}: set them to the same value"
            )
            return
        self.translation.setdefault(setting, Translated(value, key))

    def _unknown(self, key: str) -> str:
        if any(known.startswith(f"{key}.") for known in self.table):
            return f"{key} is a section of {self.project}: put settings below it"
        if hint := nearest(key, self.table, cutoff=0.85):
            return f"{key} is not a key of {self.project} that can be translated{hint}"
        section, path = key.partition(".")[0], tuple(key.split("."))
        is_shared = any(known.startswith(f"{section}.") for known in self.table)
        if (section in SECTIONS and not is_shared) or any(path[:end] in BY_PATH for end in range(1, len(path) + 1)):
            return (
                f"{key} is not a key of {self.project}, as the other keys of this file are: put settings of "
                "miles_async into another file, and pass both with --config"
            )
        return f"{key} is not a key of {self.project} that can be translated: remove it"


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal. Python counts true as 1."""
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)
