"""The schema as a flat list of settings, from which flags, YAML keys and the help text are generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from miles_async.config.schema import RunConfig, Section
from miles_async.plugins import Kind


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the schema."""

    path: tuple[str, ...]
    """Sections and field, such as ("model", "tiny_model", "num_layers")."""
    name: str
    """The name of the field with the section's flag prefix; unique across all sections."""
    kinds: frozenset[type]
    """Types of valid values: bool, int, float, str, list, dict or NoneType."""
    element: type
    """Type of the elements of a list; `str` if the setting is not a list."""
    choices: tuple[str, ...]
    """The values that a Literal allows, or the names of plug-ins; empty for any other setting."""
    default: Any
    help: str
    """The field's docstring and the help of the plug-ins that it can name, on one line."""
    plugins: Kind[Any] | None = None
    """The plug-ins that the setting names."""

    @property
    def dotted(self) -> str:
        """The path in YAML and in overrides, such as `rollout.rollout_batch_size`."""
        return ".".join(self.path)

    def value(self, config: RunConfig) -> Any:
        """The value in a configuration."""
        return reduce(getattr, self.path, config)

    @property
    def flag(self) -> str:
        """The flag on the command line, such as `--rollout-batch-size`."""
        return "--" + self.name.replace("_", "-")


def _settings(section: type[Section], path: tuple[str, ...]) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation, (*path, name))
        else:
            yield _setting((*path, name), section.flag_prefix + name, field)


def _sections(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield ".".join((*path, name)), " ".join((field.annotation.__doc__ or "").split())
            yield from _sections(field.annotation, (*path, name))


def _setting(path: tuple[str, ...], name: str, field: FieldInfo) -> Setting:
    alternatives = _alternatives(field.annotation)
    plugins = next((mark for mark in _marks(field) if isinstance(mark, Kind)), None)
    literals = tuple(name for kind in alternatives if get_origin(kind) is Literal for name in get_args(kind))
    elements = [get_args(kind)[0] for kind in alternatives if get_origin(kind) in (list, tuple)]
    return Setting(
        path=path,
        name=name,
        kinds=frozenset(_kind(alternative) for alternative in alternatives),
        element=elements[0] if elements else str,
        choices=literals if plugins is None else tuple(plugins.names),
        default=field.get_default(call_default_factory=True),
        help=" ".join([(field.description or "").replace("\n", " "), *_help_of(plugins)]),
        plugins=plugins,
    )


def _marks(field: FieldInfo) -> Iterator[Any]:
    """What annotates a field, or one of its alternatives."""
    yield from field.metadata
    for alternative in get_args(field.annotation):
        if get_origin(alternative) is Annotated:
            yield from alternative.__metadata__


def _help_of(plugins: Kind[Any] | None) -> Iterator[str]:
    for name, plugin in () if plugins is None else sorted(plugins.usable().items()):
        yield f"{name}: {plugin.help()}"


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, such as (int, NoneType) for `int | None`; any other annotation alone."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(get_args(member)[0] if get_origin(member) is Annotated else member for member in members)


def _kind(annotation: Any) -> type:
    origin = get_origin(annotation)
    if origin is Literal:
        return str
    if origin is tuple:
        return list
    return origin or annotation or NoneType


SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _settings(RunConfig, ())}
"""All settings by name, in the order of the schema."""

BY_PATH: Mapping[tuple[str, ...], Setting] = {setting.path: setting for setting in SETTINGS.values()}
"""All settings by path."""


def values_of(config: RunConfig, names: Iterable[str] = SETTINGS) -> dict[str, Any]:
    """The values of settings by name; of all settings if `names` is left out."""
    return {name: SETTINGS[name].value(config) for name in names}


def with_settings(config: RunConfig, **values: Any) -> RunConfig:
    """A copy of the configuration with other values, by the names of the settings. The values are not validated.

    Settings of nested sections, such as the tiny model, cannot be changed.
    """
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, field = SETTINGS[name].path
        changes.setdefault(section, {})[field] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    )


SECTIONS: Mapping[str, str] = dict(_sections(RunConfig, ()))
"""What each section is about, by its dotted path, such as `model.tiny_model`."""

SKIP_ROLES = ("skip", "roles")
"""Path of the setting that holds the settings of user-defined skip roles."""


def is_skip_role(path: tuple[str, ...]) -> bool:
    """Whether `path` begins with a user-defined role, such as `skip.reward`, which is short for `skip.roles.reward`."""
    return path[0] == "skip" and path[:2] not in BY_PATH and ".".join(path[:2]) not in SECTIONS


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint such as `; did you mean rollout_batch_size?`, or an empty string if no known name is similar."""
    matches = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""
