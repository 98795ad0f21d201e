"""Values of keys that are combined with others: what they must be, and the settings that they set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.config.translation import Translator

_MOST = 10**18
"""Larger numbers are mistakes, and would not fit into a float."""

Values = Mapping[str, Any]
"""The value of each key of a file, without references."""


def section(translator: Translator, values: Values, key: str) -> Mapping[str, Any]:
    """The keys below a key; none if the file does not set it."""
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        translator.problems.append(f"{key} is a section, but its value is {value!r:.80}: put settings below it")
        return {}
    return value or {}


def switch(translator: Translator, values: Values, key: str) -> bool | None:
    """The value of a key, which must be true or false; None if the file does not set it.

    ROLL reads YAML 1.1, in which `yes`, `on`, `no` and `off` are true and false, too.
    """
    value = values.get(key)
    if isinstance(value, str):
        value = {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)
    if value is None or isinstance(value, bool):
        return value
    translator.problems.append(f"{key} {value!r:.80} is neither true nor false: set it to true or false")
    return None


def whole_number(translator: Translator, values: Values, key: str) -> int | None:
    """The value of a key, which must be a whole number from 1 on; None if the file does not set it."""
    value = values.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    problem = f"{key} {value!r:.80} is not a number of 1 or more: write a whole number"
    if problem not in translator.problems:
        translator.problems.append(problem)
    return None


def number(translator: Translator, values: Values, key: str) -> float | None:
    """The value of a key, which must be a number from 0 on; None if the file does not set it."""
    value = values.get(key)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST):
        return value
    translator.problems.append(f"{key} {value!r:.80} is not a number of 0 or more: write a number")
    return None


def note(translator: Translator, values: Values, why: str, *keys: str) -> None:
    """Name those of the keys that the file sets as without effect, because of `why`."""
    translator.idle.update({key: why for key in keys if key in values})


def size(translator: Translator, setting: str) -> int:
    """A size that the file has set; 1 if it has not, or if the value is invalid, which is reported later."""
    value = translator.translation[setting].value if setting in translator.translation else 1
    return value if isinstance(value, int) and value > 0 else 1
