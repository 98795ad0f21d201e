"""The schema as a flat list of settings: what the flags, the YAML keys and the help are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from miles_async.config.schema import RunConfig, Section


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the schema."""

    path: tuple[str, ...]
    """Sections and field, such as ("model", "tiny_model", "num_layers")."""
    name: str
    """The field with its section's prefix: unique over all sections."""
    kinds: frozenset[type]
    """What it may hold: bool, int, float, str, list, dict or NoneType."""
    element: type
    """What a list holds; `str` for anything else."""
    choices: tuple[str, ...]
    """The only values a Literal allows; empty for anything else."""
    default: Any
    help: str

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _settings(section: type[Section], path: tuple[str, ...]) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation, (*path, name))
        else:
            yield _setting((*path, name), section.flag_prefix + name, field)


def _setting(path: tuple[str, ...], name: str, field: FieldInfo) -> Setting:
    alternatives = _alternatives(field.annotation)
    elements = [get_args(kind)[0] for kind in alternatives if get_origin(kind) in (list, tuple)]
    return Setting(
        path=path,
        name=name,
        kinds=frozenset(_kind(alternative) for alternative in alternatives),
        element=elements[0] if elements else str,
        choices=tuple(name for kind in alternatives if get_origin(kind) is Literal for name in get_args(kind)),
        default=field.get_default(call_default_factory=True),
        help=(field.description or "").replace("\n", " "),
    )


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """`int | None` as (int, NoneType). Literals stand as they are."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _kind(annotation: Any) -> type:
    origin = get_origin(annotation)
    if origin is Literal:
        return str
    if origin is tuple:
        return list
    return origin or annotation or NoneType


SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _settings(RunConfig, ())}
"""Every setting by its name, in the order of the schema."""

BY_PATH: Mapping[tuple[str, ...], Setting] = {setting.path: setting for setting in SETTINGS.values()}
"""Every setting by its place."""

SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(".".join(setting.path[:-1]) for setting in SETTINGS.values()))
"""Every section that holds settings, as a dotted path."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean rollout_batch_size?`, or nothing where no known name is near."""
    matches = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""
