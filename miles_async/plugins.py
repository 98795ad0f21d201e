"""The socket for everything that plugs in: how a plug-in is declared, found and checked.

A plug-in is a class that derives from the base class of its kind, such as `ModelPlugin`, and overrides what differs.
Its docstring is its help. Its own settings, if it has any, are the fields of a nested section, `Settings`, which become
settings of a section of the schema:

    class SoftGate(Objective):
        name = "sapo"

        class Settings(Section):
            sapo_temperatures: tuple[float, float] = (1.0, 1.05)

A name is looked up in three places, and the first place that has the name wins:

1. the package of the kind in miles_async, which has one file or folder per plug-in;
2. the entry points of installed packages, in the group that has the name of that package;
3. for a name with dots, the module of that path.

A package of users therefore needs one file, and one line in its pyproject.toml:

    [project.entry-points."miles_async.losses.objectives"]
    my_objective = "my_package:MyObjective"

`--help` and `--check-config` import every plug-in of the kinds that have settings. A plug-in therefore imports torch
and other large libraries inside the methods that need them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from time import process_time
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from miles_async.errors import UserError
from miles_async.json_values import shown_error
from miles_async.section import Names, Section
from miles_async.user_code import USER_CODE_ERRORS

LARGE_LIBRARIES = frozenset({"datasets", "megatron", "numpy", "ray", "sglang", "torch", "transformers"})
"""Libraries that take seconds to import, or that a command such as `--help` does not need."""
SLOW_IMPORT_SECONDS = 0.5
"""CPU time of an import from which a plug-in counts as slow."""


class Plugin:
    """The base class of all kinds of plug-ins."""

    name: ClassVar[str] = ""
    """The name by which a setting selects the plug-in. An entry point gives its own name to the plug-in."""
    Settings: ClassVar[type[Section] | None] = None
    """The plug-in's own settings; None if it has none."""
    origin: str | None = None
    """Where a plug-in of users comes from: its entry point and distribution, or its path. None for those of this
    project."""

    @classmethod
    def help(cls) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())

    def problems(self, settings: Any) -> Iterator[str]:
        """What is wrong with the plug-in's settings, in sentences that say what to change.

        `settings` is an instance of `Settings`.
        """
        yield from ()


def name_of(plugin: Plugin) -> str:
    """The name of a plug-in in error messages, as its entry point spells it: `module:Class`."""
    return f"{type(plugin).__module__}:{type(plugin).__qualname__}"


@contextmanager
def errors_of(plugin: Plugin, action: str) -> Iterator[None]:
    """Turn an error of a user's plug-in into a UserError: "ORIGIN failed to ACTION: ...". `action` is a verb.

    The errors of plug-ins of this project are not changed.
    """
    try:
        yield
    except UserError:
        raise
    except USER_CODE_ERRORS as error:
        if plugin.origin is None:
            raise
        raise UserError(f"{plugin.origin} failed to {action}: {shown_error(error)}; correct the plug-in") from error


P = TypeVar("P", bound=Plugin)


class _Found(NamedTuple, Generic[P]):
    plugin: P | None
    """None if the plug-in cannot be used."""
    problem: str | None


class Kind(Names, Generic[P]):
    """One kind of plug-in.

    A setting that names a plug-in has the annotation `Annotated[str, KIND]`; the schema then accepts the names of the
    kind, and `--help` lists them with their help.
    """

    def __init__(self, title: str, base: type[P], package: str, *, by_path: bool = True) -> None:
        """`title` is what messages call a plug-in, such as `model plug-in`. `base` is the class to derive from.

        `package` is the dotted path of the package that contains the plug-ins of this project, one per file or folder,
        and the group of the entry points. `by_path` allows dotted paths as names; names that do not come from the
        user's settings must not import modules.
        """
        self.title, self.base, self.group, self._by_path = title, base, package, by_path
        self._found: dict[str, _Found[P]] = {}

    @cached_property
    def shipped(self) -> Mapping[str, P]:
        """The plug-ins of this project by name."""
        package = importlib.import_module(self.group)
        entries = pkgutil.iter_modules(package.__path__)
        modules = [package, *(importlib.import_module(f"{self.group}.{entry.name}") for entry in entries)]
        declared = (value for module in modules for value in vars(module).values() if _is_declared_in(module, value))
        return {one.name: one() for one in declared if issubclass(one, self.base) and one.name}

    @property
    def names(self) -> Sequence[str]:
        """The names of all plug-ins, sorted. Plug-ins of installed packages are not imported."""
        return sorted({*self.shipped, *self._entries()})

    def has(self, name: str) -> bool:
        """Whether a plug-in of this project or of an installed package has the name. Does not import the plug-in."""
        return name in self.shipped or name in self._entries()

    def find(self, name: str) -> P:
        """Return the plug-in with the name, or the one that the dotted path names.

        Raises UserError if there is none, or if it cannot be used.
        """
        if (shipped := self.shipped.get(name)) is not None:
            return shipped
        if not self.has(name) and not self._is_path(name):
            raise UserError(self.missing(name))
        found = self._found.get(name) or self._found.setdefault(name, self._find(name))
        if found.plugin is None:
            raise UserError(found.problem or self.missing(name))
        return found.plugin

    def usable(self) -> Mapping[str, P]:
        """All plug-ins of this project and of installed packages that can be used, by name."""
        return {
            **self.shipped,
            **{name: found.plugin for name, found in self._installed() if found.plugin is not None},
        }

    def problems(self) -> Iterator[str]:
        """What is wrong with the plug-ins of installed packages.

        Each sentence names the distribution and the entry point, and says what to do.
        """
        for _, found in self._installed():
            if found.problem is not None:
                yield found.problem
        entries = self._entries()
        for name in sorted(self.shipped.keys() & entries.keys()) if entries else ():
            taken = f"declares the name of a {self.title} of miles_async, which is used: give it another name"
            yield f"{_origins(entries[name])} {taken}"

    def origin(self, name: str) -> str:
        """What messages say about where the plug-in with this name comes from."""
        return "miles_async" if name in self.shipped else _origins(self._entries()[name])

    def refuse(self, name: str, sentence: str) -> None:
        """Make a plug-in unusable. `sentence` says why, and what to do."""
        self._found[name] = _Found(None, sentence)

    def forget(self) -> None:
        """Look for the plug-ins of installed packages again, because the installed packages have changed."""
        _registered.cache_clear()
        self._found.clear()

    def missing(self, name: str) -> str:
        """The sentence that refuses a name that no plug-in has."""
        path = " or name your own class by its path, as module.Class," if self._by_path else ""
        return (
            f"no {self.title} is called {name!r}: use one of {', '.join(self.names)},{path} or install a package with "
            f"the entry point {name!r} in the group {self.group!r}"
        )

    def accept(self, name: Any) -> str | None:
        """Return a name that a plug-in has, or that is a dotted path. Raises ValueError for any other value."""
        if not isinstance(name, str):
            raise ValueError(f"input should be the name of a {self.title}: use one of {', '.join(self.names)}")
        if not self.has(name) and not self._is_path(name):
            raise ValueError(self.missing(name))
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.accept, handler(source))

    def _is_path(self, name: str) -> bool:
        return self._by_path and all(part.isidentifier() for part in name.split(".")) and "." in name

    def _installed(self) -> Iterator[tuple[str, _Found[P]]]:
        entries = self._entries()
        # The modules of the project are imported only to compare names.
        for name in sorted(entries.keys() - self.shipped.keys()) if entries else ():
            if name not in self._found:
                self._found[name] = self._find(name)
            yield name, self._found[name]

    def _entries(self) -> Mapping[str, Sequence[EntryPoint]]:
        """The entry points of the kind by name, except those of an older version of this project."""
        found: dict[str, list[EntryPoint]] = {}
        for entry in _registered(tuple(sys.path)).select(group=self.group):
            if entry.dist is None or entry.dist.name.replace("-", "_") != "miles_async":
                found.setdefault(entry.name, []).append(entry)
        return found

    def _find(self, name: str) -> _Found[P]:
        entries = self._entries().get(name, [])
        if len(entries) > 1:
            return _Found(None, f"{_origins(entries)} declare the same name: uninstall all but one of the packages")
        # A dotted path is an entry point that no package registers.
        module, _, attribute = name.rpartition(".")
        entry = entries[0] if entries else EntryPoint(name, f"{module}:{attribute}", self.group)
        before, started = set(sys.modules), process_time()
        try:
            declared = entry.load()
            if not (isinstance(declared, type) and issubclass(declared, self.base)):
                derive = f"{self.base.__module__}.{self.base.__qualname__}"
                return _Found(None, f"{_origin(entry)} is not a {self.title}: derive its class from {derive}")
            plugin = declared()
            plugin.origin = _origin(entry) if entries else f"the class {name}"
        except USER_CODE_ERRORS as error:
            # Importing a plug-in runs user code, which can raise any exception.
            return _Found(None, f"{_origin(entry)} cannot be imported: {shown_error(error)}")
        large = LARGE_LIBRARIES.intersection(set(sys.modules) - before)
        if entries and (large or process_time() - started > SLOW_IMPORT_SECONDS):
            what = f"imports {' and '.join(sorted(large))}" if large else "is slow to import"
            advice = "import large libraries inside the methods that need them, because --help imports the module"
            return _Found(plugin, f"{_origin(entry)} {what}: {advice}")
        return _Found(plugin, None)


@cache
def _registered(path: tuple[str, ...]) -> Any:
    """The entry points of all packages on `path`, which is `sys.path`. Reading their metadata takes tens of
    milliseconds, and each kind of plug-in needs them. Their type depends on the version of Python."""
    return entry_points()


def is_extended(group: str) -> bool:
    """Whether an installed package has an entry point in this group."""
    return bool(_registered(tuple(sys.path)).select(group=group))


def _is_declared_in(module: ModuleType, value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def _origins(entries: Sequence[EntryPoint]) -> str:
    return " and ".join(sorted(map(_origin, entries)))


def _origin(entry: EntryPoint) -> str:
    if entry.dist is None:
        return f"{entry.value.replace(':', '.')}, which a setting names,"
    return f"the entry point {entry.name} = {entry.value} of the distribution {entry.dist.name}"
