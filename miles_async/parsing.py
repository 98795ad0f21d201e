"""Converts values that come from outside to a declared type, with an error message that names the first wrong entry."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from miles_async.errors import TrajectoryError

T = TypeVar("T")
Natural = Annotated[int, Meta(ge=0, lt=2**62)]
"""A number from 0 on. It fits into 64 bits, and so does the sum of two."""
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


def parse(value: Any, schema: type[T], name: str) -> T:
    """Convert `value` to `schema`. `name` begins the error message, such as "sample 3". Raises TrajectoryError."""
    try:
        return msgspec.convert(value, schema, from_attributes=True)
    except msgspec.ValidationError as error:
        complaint, _, path = str(error).replace("`", "").partition(" - at ")
        where = path.removeprefix("$").removeprefix(".")
        sentence = complaint[:1].lower() + complaint[1:]
        path = where if where.startswith("[") else f": {where}" if where else ""
        raise TrajectoryError(f"{name}{path}: {sentence}") from None
    except UnicodeEncodeError:
        # A text in place of a number, or a text that is a key.
        raise TrajectoryError(f"{name}: a text has half of a surrogate pair; send valid UTF-8") from None


def decode_json(content: bytes | str, schema: type[T]) -> T:
    """Decode JSON of a client or a data file. Raises ValueError with a sentence that says what is wrong."""
    try:
        return msgspec.json.decode(content, type=schema)
    except RecursionError:
        raise ValueError("the JSON is nested too deep: store it flat, or as text") from None
