"""The base class of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_UNSET = ("", "null", "none", "None")
"""Texts that unset a setting which may be unset."""


class Section(BaseModel):
    """A group of related settings. The docstring under a field is the help text of its flag."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    flag_prefix: ClassVar[str] = ""
    """Put in front of the section's field names in flags: `skip_rollout_` turns `enable` into
    `--skip-rollout-enable`."""

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Unset a setting that is set to a text such as `None`, and refuse true and false for numbers.

        Python counts true as 1.
        """
        annotation: Any = cls.model_fields[str(info.field_name)].annotation
        types = _types(annotation)
        if isinstance(value, str) and value in _UNSET and NoneType in types and value not in types:
            return None
        entries = value if isinstance(value, list | tuple) else [value]
        if types.isdisjoint((bool, Any)) and any(isinstance(entry, bool) for entry in entries):
            kind = "number" if not types.isdisjoint((int, float)) else "text"
            raise ValueError(f"input should be a {kind}")
        return value


@cache
def _types(annotation: Any) -> frozenset[Any]:
    """All types and literals in an annotation, such as {list, int, NoneType} for `list[int] | None`."""
    return frozenset(_parts(annotation))


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
