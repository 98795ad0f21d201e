"""The base class of all sections of the configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

LARGEST = 2**63
"""Libraries cannot represent integers of this size or more."""
LONGEST_SECONDS = 1e9
"""32 years. Timers of libraries overflow beyond it."""
_HOME_OF_USER = re.compile(r"~[\w.-]+(?=/|$)")
_UNSET = ("", "null", "none", "None")
"""Texts that unset a setting which may be unset."""


class Names:
    """Annotates a text that has to be one of some names."""

    def has(self, name: str) -> bool:
        """Whether it is one of them."""
        raise NotImplementedError


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
        """Unset a setting that is set to a text such as `None`. Refuse true, false and huge integers for numbers, and
        homes of unknown users.

        Python counts true as 1, and pydantic reads the text `0-3` as -3.
        """
        annotation: Any = cls.model_fields[str(info.field_name)].annotation
        types = _types(annotation)
        if isinstance(value, str) and value in _UNSET and NoneType in types and not _is_name(value, types):
            return None
        if isinstance(value, str) and (home := _HOME_OF_USER.match(value)) and os.path.expanduser(home[0]) == home[0]:
            raise ValueError(f"this machine has no user {home[0][1:]}: write the whole path")
        entries = value if isinstance(value, list | tuple) else [value]
        if types.isdisjoint((bool, Any)) and any(isinstance(entry, bool) for entry in entries):
            kind = "number" if not types.isdisjoint((int, float)) else "text"
            raise ValueError(f"input should be a {kind}")
        if not types.isdisjoint((int, float)) and types.isdisjoint((str, Any)):
            for entry in entries:
                if isinstance(entry, str) and not _is_number(entry):
                    raise ValueError(f"input should be a valid {'integer' if int in types else 'number'}")
                if isinstance(entry, int) and abs(entry) >= LARGEST:
                    raise ValueError(f"input should be less than {LARGEST}")
        return value


def _is_name(text: str, types: frozenset[Any]) -> bool:
    return text in types or any(isinstance(part, Names) and part.has(text) for part in types)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@cache
def _types(annotation: Any) -> frozenset[Any]:
    """All types and literals in an annotation, such as {list, int, NoneType} for `list[int] | None`."""
    return frozenset(_parts(annotation))


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)
