"""Defaults of other projects, which guests know: `--preset` sets them, and each run names its own that differ."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from types import NoneType
from typing import Any

from miles_async.config.checks.unused import has_effect
from miles_async.config.fields import SETTINGS, nearest, with_settings
from miles_async.config.generation import generates
from miles_async.config.losses import clip_range, estimator_of, loss_aggregation
from miles_async.config.model_shape import shape_of
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError
from miles_async.guests import GUESTS, Guest
from miles_async.plugins import name_of

_DERIVED: Mapping[str, Callable[[RunConfig], Any]] = {
    "eps_clip": lambda config: clip_range(config.algorithm)[0],
    "loss_aggregation": lambda config: loss_aggregation(config.algorithm),
    "off_policy_correction": lambda config: config.algorithm.off_policy_correction or "none",
}
"""Settings that are unset as long as their values follow from others."""
_HAS_EFFECT: Mapping[str, Callable[[RunConfig], bool]] = {
    **dict.fromkeys(("input_key", "label_key"), lambda config: bool(config.data.prompt_data or config.data.datasets)),
    **dict.fromkeys(("critic_lr", "value_clip"), lambda config: estimator_of(config.algorithm).trains_critic),
    **dict.fromkeys(("engine_health_interval_seconds", "sglang_router_request_timeout_secs"), generates),
    "moe_router_dtype": lambda config: (shape := shape_of(config.model)) is not None and bool(shape.experts),
}


def names() -> list[str]:
    """What `--preset` accepts."""
    return sorted(name.lower() for name, defaults in _of_guests().items() if defaults)


def preset(name: str) -> Mapping[str, Any]:
    """The values that a preset sets, by setting. Raises UserError if there is no such preset."""
    if name not in names():
        similar = nearest(name, names()) or f"; choose one of {', '.join(names())}"
        raise UserError(f"--preset {name:.80} is not a project whose defaults are known{similar}")
    defaults = next(values for guest, values in _of_guests().items() if guest.lower() == name)
    return {each: value for each, value in defaults.items() if value is not None or NoneType in SETTINGS[each].kinds}


def described(name: str) -> str:
    """What a preset sets, one setting per line."""
    lines = [f"  {SETTINGS[setting].dotted} = {_shown(value)}" for setting, value in preset(name).items()]
    return "\n".join([f"--preset {name} sets, unless a file or a flag does:", *lines])


def without_idle(config: RunConfig, name: str) -> RunConfig:
    """The configuration in which values of the preset that have no effect are our defaults, so nothing is said of
    them."""
    values = {each: value for each, value in preset(name).items() if not _is_used(config, each)}
    idle = {each for each, value in values.items() if SETTINGS[each].value(config) == value}
    return with_settings(config, **{each: SETTINGS[each].default for each in idle})


def unlike(config: RunConfig, given: Container[tuple[str, ...]], preset: str | None = None) -> Iterator[str]:
    """One sentence per compared project: our defaults that differ, and values that mean something else there.

    The project's default, or our value with the project's meaning, is in parentheses. `given` are the paths of the
    settings that the user has set. With a preset, only its project is compared, and only the meaning of values.
    """
    for name, defaults in _of_guests().items():
        guest = GUESTS.find(name)
        is_compared = guest.is_compared if preset is None else guest.name.lower() == preset
        if not is_compared:
            continue
        found = {
            setting: (ours, theirs)
            for setting, theirs in ({} if preset else defaults).items()
            if SETTINGS[setting].path not in given
            and (ours := _value(config, setting)) != theirs
            # Arguments of SGLang and its router only change the speed.
            and dict not in SETTINGS[setting].kinds
            and _is_used(config, setting)
        }
        for setting, values in guest.equivalents().items():
            if (ours := next((value for value in _used(config, setting) if value in values), None)) is not None:
                found[setting] = ours, values[ours]
        if found:
            shown = (f"{setting} {_shown(ours)} ({_shown(theirs)})" for setting, (ours, theirs) in found.items())
            yield f"unlike {guest.name} (its value in parentheses): {', '.join(shown)}"


def _used(config: RunConfig, setting: str) -> Iterator[Any]:
    """The value of a setting, and the values that data sets have instead."""
    yield SETTINGS[setting].value(config)
    for dataset in (*config.data.datasets.values(), *config.rollout.eval_datasets.values()):
        yield dataset.model_dump().get(setting)


def like(guest: Guest, before: RunConfig, after: RunConfig) -> Iterator[str]:
    """One sentence if a guest has set some of its defaults: their values, and ours in parentheses.

    `before` and `after` are the configurations before and after it resolved its settings.
    """
    found = [
        f"{name} {_shown(theirs)} ({_shown(ours)})"
        for name, theirs in _defaults(guest).items()
        if (ours := SETTINGS[name].value(before)) != theirs == SETTINGS[name].value(after)
    ]
    if found:
        yield f"like {guest.name} (default here in parentheses): {', '.join(found)}"


def _of_guests() -> Mapping[str, Mapping[str, Any]]:
    return GUESTS.ask("name its defaults", _defaults)


def _defaults(guest: Guest) -> Mapping[str, Any]:
    values = guest.defaults()
    if unknown := values.keys() - SETTINGS.keys():
        raise UserError(f"{name_of(guest)} has defaults of {', '.join(sorted(unknown))}: use only names of settings")
    return values


def _value(config: RunConfig, name: str) -> Any:
    return _DERIVED[name](config) if name in _DERIVED else SETTINGS[name].value(config)


def _is_used(config: RunConfig, name: str) -> bool:
    """Whether a setting has an effect in this run."""
    used = _HAS_EFFECT.get(name)
    return has_effect(config, name) and (used is None or used(config))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
