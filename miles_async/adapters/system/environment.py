"""Environment variables of this process that are set for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables_set(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set the variables in `os.environ` within the context and restore them afterwards; None unsets a variable.

    The environment belongs to the process, so all threads see the change.
    """
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
