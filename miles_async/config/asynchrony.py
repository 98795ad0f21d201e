"""Recognises from its source how a rollout function generates, without importing the user's module.

The schedule of a run follows from it. These are all the cases that are recognised; a function of any other form returns
one batch per call.

1. The decorator `@fully_async` (`miles_async.rollout.fully_async`): the function drains the stream. With
   `@fully_async(keeps_groups=True)` it has a worker.
2. The function uses the name `drain_stream` or `generate_rollout_fully_async`: in its body, in a decorator such as
   `@wraps(generate_rollout_fully_async)`, or in an assignment such as `rollout = timed(generate_rollout_fully_async)`.
3. The function starts a `Thread` and calls `get_samples`, as slime's `fully_async_rollout.py` does: it has a worker.
4. The name is imported from another module, in which 1 to 3 apply.

In 2 and 3, functions and classes of the same module count if the function uses their names, directly or indirectly.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

DECORATOR = "fully_async"
STREAM_FUNCTION = "generate_rollout_fully_async"
_MAX_IMPORTS = 8
"""Modules that are read to find where a function is defined."""


class Asynchrony(StrEnum):
    """How a rollout function generates."""

    BATCH = "returns one batch per call"
    STREAM = "drains the stream"
    """It takes its groups from the queue that the pipeline's producer fills."""
    WORKER = "has a worker that keeps groups between calls"
    """It generates in the background by itself, so the producer does not run."""


def asynchrony_of(path: str) -> Asynchrony:
    """How the rollout function at `path` (`module.function`) generates; BATCH if its source cannot be read."""
    return _asynchrony(path, _MAX_IMPORTS)


def _asynchrony(path: str, imports_left: int) -> Asynchrony:
    module_path, _, name = path.rpartition(".")
    file = _source_file(module_path)
    module = _read(file, file.stat().st_mtime_ns) if file is not None and imports_left else None
    if file is None or module is None:
        return Asynchrony.BATCH
    package = module_path if file.name == "__init__.py" else module_path.rpartition(".")[0]
    if (origin := module.origin(name, package)) is not None:
        return _asynchrony(origin, imports_left - 1)
    if (declared := _decorated(module.definitions.get(name))) is not None:
        return declared
    used = list(module.used_by(name))
    names = {_name(node) for node in used}
    if "drain_stream" in names:
        return Asynchrony.STREAM
    for node in used:
        if (origin := module.stream_function(node, package)) is not None:
            return _asynchrony(origin, imports_left - 1)
    starts_thread = any(isinstance(node, ast.Call) and _name(node.func) == "Thread" for node in used)
    return Asynchrony.WORKER if starts_thread and "get_samples" in names else Asynchrony.BATCH


def _decorated(definition: ast.AST | None) -> Asynchrony | None:
    """What the decorator `fully_async` declares; None without the decorator."""
    decorators = definition.decorator_list if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef) else []
    for decorator in decorators:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if _name(called) == DECORATOR:
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            keeps_groups = any(
                keyword.arg == "keeps_groups" and isinstance(keyword.value, ast.Constant) and keyword.value.value
                for keyword in keywords
            )
            return Asynchrony.WORKER if keeps_groups else Asynchrony.STREAM
    return None


class _Module:
    """The top-level names of a module's source."""

    def __init__(self, source: str) -> None:
        """Raises SyntaxError."""
        self.definitions: dict[str, ast.AST] = {}
        self._origins: dict[str, tuple[int, str]] = {}
        """Level of a relative import, and dotted path, of each imported name."""
        for node in ast.parse(source).body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self.definitions[node.name] = node
                case ast.Assign():
                    for target in node.targets:
                        self.definitions[_name(target)] = node
                case ast.ImportFrom():
                    for alias in node.names:
                        path = f"{node.module}.{alias.name}" if node.module else alias.name
                        self._origins[alias.asname or alias.name] = node.level, path
                case ast.Import():
                    for alias in node.names:
                        self._origins[alias.asname or alias.name] = 0, alias.name

    def origin(self, name: str, package: str) -> str | None:
        """The dotted path of a name that the module, which is in `package`, imports; None for other names."""
        if name in self.definitions or name not in self._origins:
            return None
        level, path = self._origins[name]
        parents = package.split(".")
        return ".".join([*parents[: len(parents) + 1 - level], path]) if level else path

    def used_by(self, name: str) -> Iterator[ast.AST]:
        """The nodes of a definition, and of the definitions in this module that it uses."""
        waiting, seen = [name], {name}
        while waiting:
            definition = self.definitions.get(waiting.pop())
            for node in ast.walk(definition) if definition is not None else ():
                yield node
                if isinstance(node, ast.Name) and node.id not in seen:
                    seen.add(node.id)
                    waiting.append(node.id)

    def stream_function(self, node: ast.AST, package: str) -> str | None:
        """The dotted path of an imported `generate_rollout_fully_async` that `node` names; None for other nodes."""
        match node:
            case ast.Name(id=name):
                origin = self.origin(name, package)
            case ast.Attribute(attr=attribute):
                owner = self.origin(ast.unparse(node.value), package)
                origin = f"{owner}.{attribute}" if owner is not None else None
            case _:
                return None
        return origin if origin is not None and origin.endswith(f".{STREAM_FUNCTION}") else None


def _name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for other nodes."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _source_file(module_path: str) -> Path | None:
    """The source file of a module. Unlike `find_spec`, this does not import its parent packages."""
    top, *rest = module_path.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # an empty name, or a module without a specification
        return None
    if spec is None:
        return None
    if not rest:
        candidates = [Path(spec.origin)] if spec.origin is not None else []
    else:
        folders = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
        candidates = [path for base in folders for path in (base.with_name(f"{rest[-1]}.py"), base / "__init__.py")]
    return next((file for file in candidates if file.suffix == ".py" and file.is_file()), None)


@lru_cache(maxsize=16)
def _read(file: Path, modified_ns: int) -> _Module | None:
    """The names of a source file, which is read again after it was modified; None if it is not valid Python."""
    try:
        return _Module(file.read_text())
    except (OSError, SyntaxError, ValueError):
        # Importing the module reports the error.
        return None
