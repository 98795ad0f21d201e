"""What the flags of other projects mean here, in words, for `--help-slime` and the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from miles_async.config.fields import SETTINGS
from miles_async.config.guest_flags import shown
from miles_async.config.translation import Combined, Flag, Idle, Only, Refused, Sets
from miles_async.errors import UserError
from miles_async.guests import GUESTS

COMPARED = "model.megatron_model_flags."
PASSED_ON = "learner.megatron_args."


def meaning(name: str, flag: Flag) -> tuple[str, str]:
    """The kind of a flag's rule, such as `mapped`, and what the flag does, as the rest of a sentence."""
    match flag.rule:
        case Sets(settings, None) if settings[0].startswith(COMPARED):
            return "compared", "is compared with config.json of hf_checkpoint"
        case Sets(settings, values) if settings[0].startswith(PASSED_ON):
            given = "" if values is None else f" to {next(iter(values.values()))}"
            return "passed on", f"sets Megatron-core's {settings[0].removeprefix(PASSED_ON)}{given}"
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
    """A line for each flag of a project that is no flag of this project. Raises UserError for an unknown project."""
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
