"""What Hydra and OmegaConf make of a configuration file: the files that it includes, and `${key}`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from miles_async.config.yaml_text import read_keys
from miles_async.errors import UserError

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_MAX_TEXT = 1 << 16
"""Characters of a value, so that references to references do not fill the memory."""


def composed(content: Mapping[str, Any], path: Path, including: Sequence[Path] = ()) -> dict[str, Any]:
    """The content of the file `path` with that of the files in its `defaults`, which the file itself overrides.

    Raises UserError if a file in `defaults` cannot be read.
    """
    merged: dict[str, Any] = {}
    own = {key: value for key, value in content.items() if key != "defaults"}
    listed = content.get("defaults") or []
    for entry in listed if isinstance(listed, list) else [listed]:
        if entry == "_self_":
            merged, own = _merged(merged, own), {}
            continue
        name, _, package = entry.partition("@") if isinstance(entry, str) else ("", "", "")
        if not name or package not in ("", "_here_", "_global_") or (not package and "/" in name):
            raise UserError(f"{path}: defaults {entry!r:.80} cannot be included: write it as name@_here_")
        file = (path.parent / f"{name.removesuffix('.yaml')}.yaml").resolve()
        if file in including:
            raise UserError(f"{path}: defaults {entry} includes itself: remove it")
        content_of_file = read_keys(f"{path}: defaults {entry}: {file}", file.read_text)
        merged = _merged(merged, composed(content_of_file, file, (*including, file)))
    return _merged(merged, own)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both; those of `other` win, section by section."""
    both = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            both[key] = _merged(one[key], other[key])
    return both


class Unresolved(Exception):
    """A value refers to something that the file does not define. The message continues a sentence about the key."""


@dataclass(frozen=True, slots=True)
class References:
    """Replaces `${key}` by the value of another key, `${oc.env:NAME}` by a variable, and `${now:FORMAT}` by the time.

    `${oc.env:NAME,text}` is the text if there is no such variable.
    """

    content: Mapping[str, Any]

    def resolved(self, value: Any, including: Sequence[str] = ()) -> Any:
        """The value without references. Raises Unresolved if one cannot be replaced."""
        if isinstance(value, Mapping):
            return {name: self.resolved(one, including) for name, one in value.items()}
        if isinstance(value, list):
            return [self.resolved(one, including) for one in value]
        if not isinstance(value, str):
            return value
        if whole := _REFERENCE.fullmatch(value):
            return self._value(whole[1], including)
        text = _REFERENCE.sub(lambda match: str(self._value(match[1], including)), value)
        if len(text) > _MAX_TEXT:
            raise Unresolved("refers to a text that is too long: write the value")
        return text

    def names(self, value: Any) -> set[str]:
        """The keys to which a value refers, without those to which their values refer."""
        if isinstance(value, Mapping | list):
            return set().union(*map(self.names, value.values() if isinstance(value, Mapping) else value))
        return set(_REFERENCE.findall(value)) if isinstance(value, str) else set()

    def _value(self, name: str, including: Sequence[str]) -> Any:
        resolver, is_call, argument = name.partition(":")
        if is_call:
            return self._call(resolver, argument, name)
        if name in including:
            raise Unresolved(f"refers to ${{{name}}}, which refers to itself: write the value")
        found: Any = self.content
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise Unresolved(f"refers to ${{{name}}}, which this file does not set: write the value")
            found = found[part]
        return self.resolved(found, (*including, name))

    def _call(self, resolver: str, argument: str, name: str) -> str:
        if resolver == "oc.env":
            variable, has_default, default = argument.partition(",")
            if variable in os.environ or has_default:
                return os.environ.get(variable, default.strip())
            raise Unresolved(f"refers to ${{{name}}}, but there is no such variable: set it, or write the value")
        if resolver == "now":
            return datetime.now().strftime(argument)
        raise Unresolved(f"refers to ${{{name}}}, which is unknown: write the value")
