"""Imports user functions, which settings name as `module.function`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from miles_async.config.fields import SETTINGS
from miles_async.config.schema import RunConfig
from miles_async.errors import UserError

PLAIN_FUNCTIONS = (
    "buffer_filter_path",
    "dynamic_sampling_filter_path",
    "over_sampling_filter_path",
    "rollout_sample_filter_path",
    "warm_start_examples_path",
)
"""Settings whose functions are not awaited."""


SLIME_IMPORTS = "miles_async.rollout.slime_imports.install_slime_imports"
"""Lets users' modules import slime's names. Loaded by its path, because configuration does not import the library."""


def install_slime_imports() -> None:
    """Apply `--slime-imports` in this process. Call it before users' modules are imported."""
    load_function(SLIME_IMPORTS, setting="slime_imports")()


def check_functions(config: RunConfig) -> None:
    """Import every function that a setting names. Raises UserError with one line per function that fails.

    The modules of this project are only read: importing them would load NumPy and other libraries, which takes seconds.
    """
    if config.rollout.slime_imports:
        install_slime_imports()
    whole: Any = config
    settings: dict[str, Any] = {setting.name: reduce(getattr, setting.path, whole) for setting in SETTINGS.values()}
    named = {name: path for name, path in settings.items() if name.endswith("_path") and isinstance(path, str)}
    for name, dataset in config.rollout.eval_datasets.items():
        if dataset.custom_rm_path is not None:
            named[f"eval_datasets.{name}.custom_rm_path"] = dataset.custom_rm_path
    problems = []
    for name, path in named.items():
        try:
            if not _is_defined_here(path):
                load_function(path, setting=name, plain=name in PLAIN_FUNCTIONS)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


def _is_defined_here(path: str) -> bool:
    """Whether a module of this project defines or imports the function."""
    module_path, _, name = path.rpartition(".")
    if not module_path.startswith("miles_async."):
        return False
    try:
        spec = importlib.util.find_spec(module_path)
    except ModuleNotFoundError:
        return False
    if spec is None or spec.origin is None:
        return False
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return True
    return False


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
