"""Imports user functions, which settings name as `module.function`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from miles_async.errors import UserError


def load_function(path: str, *, setting: str, plain: bool = False) -> Callable[..., Any]:
    """Import the function at `path`, which is written as `module.function`.

    `setting` is the setting that holds the path, for error messages. With `plain=True`, async functions are rejected.
    Raises UserError if the module does not exist or fails to import, has no such function, or the function is async
    although `plain` is set.
    """
    module_path, _, name = path.rpartition(".")
    if not module_path:
        raise UserError(f"{setting} {path!r} has no module: write module.function")
    module = _import(module_path, f"{setting} {path!r} cannot be imported")
    if not hasattr(module, name):
        public = [other for other, value in vars(module).items() if callable(value)]
        near = get_close_matches(name, public, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"{setting} {path!r}: module {module.__name__} has no function {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{setting} {path!r} is a {type(function).__name__}, not a function")
    if plain and inspect.iscoroutinefunction(function):
        raise UserError(f"{setting} {path!r} is async: write it with a plain def, because it is not awaited")
    return function  # type: ignore[no-any-return]


def _import(module_path: str, problem: str) -> ModuleType:
    try:
        return importlib.import_module(module_path)
    except Exception as error:
        # Importing runs user code, which can raise any exception.
        raise UserError(f"{problem}: {type(error).__name__}: {error}") from error
