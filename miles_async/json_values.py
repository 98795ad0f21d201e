"""Converts values of users and data files to values that every JSON writer of this project accepts.

Data files and user functions may put any object into a sample's metadata. Samples are written to checkpoints, dead
letters, recordings and rollout files, and a value that JSON cannot express must not end the run there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from typing import Any

_INT64 = range(-(2**63), 2**64)
"""Integers that orjson writes."""


def json_value(value: Any) -> Any:
    """Convert a value to strings, numbers, booleans, None, lists and dictionaries with string keys.

    Dates become ISO 8601 text, and arrays and numbers of NumPy become lists and numbers. Integers of more than 64 bits
    and objects of any other class become text. Half surrogate pairs in text are replaced by question marks.
    """
    # The exact types come first, because most values have one of them.
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, int):
        return int(value) if value in _INT64 else str(int(value))
    if isinstance(value, float) and not hasattr(value, "tolist"):
        return float(value)
    if isinstance(value, Mapping):
        return {str(json_value(key)): json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(entry) for entry in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):
        # Arrays and numbers of NumPy; their elements may be objects again.
        return json_value(value.tolist())
    return _text(str(value))


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        # A response that ends within a character has half of a surrogate pair, which UTF-8 does not allow.
        return text.encode(errors="replace").decode()
    return text
