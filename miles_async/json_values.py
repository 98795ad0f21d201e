"""Converts values of users, models and clients to plain values, which every writer of this project accepts.

Data files, user functions and clients may hand in any object. It is converted where it enters; `sample_schema.py` does
so for samples. Everything behind that place stores, sends and prints plain values without checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from math import isfinite
from numbers import Real
from typing import Any

from miles_async.visible_text import visible_text

MAX_DEPTH = 64
"""Levels of nesting that a value may have. The JSON and MessagePack libraries accept more."""
MAX_NUMBER = 1e15
"""Largest absolute value of a number that the learner computes with, in float32: its square is finite."""
SHOWN_CHARACTERS = 500
"""Most characters of a value in an error message."""
_INT64 = range(-(2**63), 2**64)
"""Integers that orjson writes."""


class UnrepresentableError(ValueError):
    """A value cannot be converted. The message ends a sentence that begins with the name of the value."""


def json_value(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Convert a value to strings, numbers, booleans, None, lists and dictionaries with string keys, all of them copies.

    Dates become ISO 8601 text, and arrays and numbers of NumPy become lists and numbers. Integers of more than 64 bits
    and objects of any other class become text. Half surrogate pairs in text are replaced by question marks.

    Raises UnrepresentableError if the value has more than `depth` levels, for example because it contains itself, or if
    a method of one of its objects raises.
    """
    # The exact types come first, because most values have one of them.
    kind = type(value)
    if value is None or kind in (bool, float) or (kind is int and value in _INT64):
        return value
    if kind is str:
        return plain_text(value)
    if depth < 0:
        raise UnrepresentableError(f"is nested more than {MAX_DEPTH} levels deep: store it flat, or as text")
    try:
        return _converted(value, depth - 1)
    except UnrepresentableError:
        raise
    except Exception as error:
        # A method of a user's object may raise anything.
        raise UnrepresentableError(f"contains {shown_type(value)} that cannot be read: {shown_error(error)}") from error


def _converted(value: Any, depth: int) -> Any:
    # A subclass may replace the methods of its built-in class, so those of the built-in class are called.
    if isinstance(value, str):
        return plain_text(str.__str__(value))
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number in _INT64 else str(number)
    if isinstance(value, float) and not hasattr(value, "tolist"):
        return float.__float__(value)
    if isinstance(value, dict | Mapping):  # a dictionary is recognized faster than another mapping
        return {str(json_value(key, depth)): json_value(entry, depth) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(entry, depth) for entry in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):
        # Arrays and numbers of NumPy; their elements may be objects again.
        return json_value(value.tolist(), depth)
    return plain_text(str(value))


def readable_entries(values: Mapping[Any, Any], refused: list[str] | None = None) -> dict[str, Any]:
    """Convert a mapping as `json_value` does, with the reason in place of each entry that cannot be converted.

    The reasons, with the names of the entries, are appended to `refused`.
    """
    plain: dict[str, Any] = {}
    for key, value in list(values.items()):
        name = None
        try:
            name = str(json_value(key))
            plain[name] = json_value(value)
        except UnrepresentableError as error:
            name = shown(key) if name is None else name
            plain[name] = f"the value {error}"
            if refused is not None:
                refused.append(f"[{name!r}] {error}")
    return plain


def plain_text(text: str) -> str:
    """Return `text` with half surrogate pairs replaced by question marks, because UTF-8 does not allow them.

    A response that ends within a character, and an undecodable file name, have half of a pair.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()


def finite_number(value: Any) -> float | None:
    """Return a number of Python or NumPy, or an array or tensor of one number, as a float.

    Returns None for anything else, and for numbers beyond `MAX_NUMBER`.
    """
    # Almost all values are floats or None, and `isinstance` is slow with an abstract class such as `Real`.
    if value is None:
        return None
    if type(value) is float:
        return value if -MAX_NUMBER <= value <= MAX_NUMBER else None
    try:
        if not isinstance(value, Real) and hasattr(value, "tolist"):
            value = value.tolist()
        number = float(value) if isinstance(value, Real) else None
    except Exception:
        # A method of a user's object may raise anything.
        return None
    return number if number is not None and isfinite(number) and abs(number) <= MAX_NUMBER else None


def shown(value: object) -> str:
    """Return the `repr` of any object for an error message: visible text of at most `SHOWN_CHARACTERS` characters."""
    try:
        text = repr(value)
    except Exception:
        # A method of a user's object may raise anything.
        return shown_type(value)
    return visible_text(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")


def shown_error(error: BaseException) -> str:
    """Return the class and the message of an exception of a user's code, as visible text."""
    try:
        text = visible_text(str(error))
    except Exception:
        # A method of a user's exception may raise anything.
        text = "(its message cannot be read)"
    return f"{type(error).__name__}: {text}"


def shown_type(value: object) -> str:
    """Return the class of a value with its article, such as `an object of class Tensor`."""
    return f"an object of class {type(value).__name__}"
