"""Flags of other projects' command lines, such as those of slime and Megatron-LM, which guests give rules.

`meaning` says in words what a flag means here, for `--help-slime` and the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_async.config.fields import BY_PATH, SETTINGS, Setting
from miles_async.config.translation import Combined, Flag, Idle, Only, Outcome, Refused, Sets, Translator
from miles_async.config.yaml_text import plain_yaml
from miles_async.errors import UserError
from miles_async.guests import GUESTS
from miles_async.plugins import errors_of

_COMPARED = "model.megatron_model_flags."
_PASSED_ON = "learner.megatron_args."


def aliased(flag: Flag) -> Setting | None:
    """The setting of ours that a flag is another name for; None if the flag means anything else."""
    if not isinstance(flag.rule, Sets) or flag.rule.values is not None or len(flag.rule.settings) != 1:
        return None
    return BY_PATH.get(tuple(flag.rule.settings[0].split(".")))


@dataclass(slots=True)
class GuestFlags:
    """The flags of other projects on one command line."""

    _values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By guest and flag."""
    aliases: set[str] = field(default_factory=set)
    """The flags on the command line that are other names of settings, as the user wrote them."""

    def add(self, guest: str, name: str, value: Any) -> None:
        """Note the value of a flag. If a flag is repeated, the last value counts, as with argparse."""
        self._values.setdefault(guest, {})[name] = value

    def outcomes(self) -> Iterator[Outcome]:
        """What the flags of each guest mean here."""
        for name, values in self._values.items():
            guest = GUESTS.find(name)
            with errors_of(guest, "translate its flags"):
                flags = guest.flags()
                translator = Translator(name, {flag: flags[flag].rule for flag in values})
                for flag, value in values.items():
                    translator.follow(flags[flag].rule, shown(flag), value)
                guest.combine(values, translator)
            yield translator


def find_flag(name: str) -> tuple[str, Flag] | None:
    """The first guest that has a flag, which is given with underscores, and its rule; None if no guest has it."""
    return next(((guest, flags[name]) for guest, flags in _known_flags().items() if name in flags), None)


def flags_of_guests() -> list[str]:
    """The flags of all guests, as users write them."""
    return [shown(name) for flags in _known_flags().values() for name in flags]


def _known_flags() -> Mapping[str, Mapping[str, Flag]]:
    """The flags of each guest, by its name."""
    return GUESTS.ask("name its flags", lambda guest: guest.flags())


def shown(name: str) -> str:
    """A flag as users write it."""
    return "--" + name.replace("_", "-")


def value_of(flag: Flag, text: str, words: Sequence[str]) -> tuple[Any, int]:
    """The value of the flag `text` from the words that follow it, and how many of them belong to it."""
    if flag.takes == "nothing" or (flag.takes == "option" and not words):
        return True, 0
    if not words:
        raise UserError(f"{text} needs a value")
    return (list(map(_plain, words)), len(words)) if flag.takes == "values" else (_plain(words[0]), 1)


def _plain(text: str) -> Any:
    """A number or a truth value; anything else stays a text."""
    value = plain_yaml(text)
    return value if isinstance(value, bool | int | float) else text


def meaning(name: str, flag: Flag) -> tuple[str, str]:
    """The kind of a flag's rule, such as `mapped`, and what the flag does, as the rest of a sentence."""
    match flag.rule:
        case Sets(settings, None) if settings[0].startswith(_COMPARED):
            return "compared", "is compared with config.json of hf_checkpoint"
        case Sets(settings, values) if settings[0].startswith(_PASSED_ON):
            given = "" if values is None else f" to {next(iter(values.values()))}"
            return "passed on", f"sets Megatron-core's {settings[0].removeprefix(_PASSED_ON)}{given}"
        case Sets(settings, None):
            return "mapped", f"sets {', '.join(settings)}"
        case Sets(settings, values) if values is not None:
            pairs = ", ".join(f"{their} to {ours}" for their, ours in values.items() if their is not True)
            ours = values.get(True)
            return "mapped", f"sets {', '.join(settings)}" + (f" to {ours}" if ours is not None else f": {pairs}")
        case Only(values, instead):
            texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
            allowed = ", ".join(dict.fromkeys(texts))
            return "compared", f"may only be {allowed}: {instead}"
        case Idle(why, _):
            return "without effect", why
        case Refused(instead):
            return "refused", instead
        case Combined(does, kind):
            return kind, does
    raise AssertionError(f"{name} has a rule without a meaning: {flag.rule!r}")


def guest_help(project: str) -> str:
    """A line for each flag of a project that is not a flag of this project. Raises UserError for an unknown project."""
    known = {name.lower().removesuffix("-lm"): name for name in GUESTS.names}
    if project.lower() not in known:
        names = ", ".join(f"--help-{name}" for name in sorted(known) if GUESTS.find(known[name]).flags())
        raise UserError(f"--help-{project} names no project whose flags are known: use one of {names}")
    return "\n".join(_lines(known[project.lower()]))


def _lines(name: str) -> Iterator[str]:
    yield f"Flags of {name} beside those of --help:"
    for flag, entry in sorted(GUESTS.find(name).flags().items()):
        if flag not in SETTINGS:
            yield f"  {shown(flag)} {meaning(flag, entry)[1]}"
