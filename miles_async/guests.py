"""Guests: other projects whose configuration files, names and calling conventions work in a run.

A guest is a plug-in (`miles_async/plugins.py`). The guests of this project are the folders of `miles_async/compat`,
which the rest of the project reaches through `GUESTS` only. A package of a user adds a guest with an entry point:

    [project.entry-points."miles_async.compat"]
    my_project = "my_package:MyProject"

A run asks every guest. A method that a guest does not override has no effect. The schema imports all guests, so a guest
imports `miles_async.config` only inside its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from miles_async.plugins import Kind, Plugin, errors_of

if TYPE_CHECKING:
    from miles_async.config.schema import RunConfig
    from miles_async.config.translation import Flag, Outcome, Translator
    from miles_async.rollout.recordings import RecordingContext
    from miles_async.types import Group


T = TypeVar("T")


class Guest(Plugin):
    """Another project. Its `Settings` are added to the section `rollout`."""

    is_compared: ClassVar[bool] = False
    """Whether each run names its defaults that differ from the project's."""
    recorded: ClassVar[tuple[str, ...]] = ()
    """The guest's settings on which responses depend. A recording that was made with others is not replayed."""

    def recognises(self, content: Mapping[str, Any]) -> bool:
        """Whether a configuration file with this content is one of the project."""
        return False

    def has_key(self, key: str) -> bool:
        """Whether `key=value` on the command line sets a key of the project."""
        return False

    def keys(self) -> Iterable[str]:
        """Return the keys that `key=value` on the command line may set, for hints about misspelt ones."""
        return ()

    def translate(self, content: Mapping[str, Any]) -> Outcome:
        """Return what the content of a file, or a key of the command line, means here.

        A key is refused because it is unknown, has no counterpart, or contradicts another key. Called only for files
        and keys that the guest recognises.
        """
        raise NotImplementedError

    def flags(self) -> Mapping[str, Flag]:
        """Return the flags of the project's command line that differ from ours, by name, with underscores."""
        return {}

    def combine(self, values: Mapping[str, Any], translator: Translator) -> None:
        """Translate the flags whose rule is `Combined`; `values` are those on the command line, by name."""

    def defaults(self) -> Mapping[str, Any]:
        """Return the project's defaults, by the names of our settings, which `--preset` sets.

        A setting that the project requires is None.
        """
        return {}

    def equivalents(self) -> Mapping[str, Mapping[Any, Any]]:
        """Return, by the names of our settings, values that mean something else in the project.

        Each has the value that means here what it means there.
        """
        return {}

    def resolve(self, config: RunConfig) -> RunConfig:
        """Return the configuration in which the guest's own settings have set what they stand for."""
        return config

    def arguments(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the attributes of `args` that functions of the project expect in addition to all settings."""
        return {}

    def install_modules(self, settings: Mapping[str, Any]) -> None:
        """Make modules of the project importable. Called in each process before it imports users' modules.

        A second call in the same process does nothing.
        """

    def adapt_function(self, function: Callable[..., Any], name: str, setting: str) -> Callable[..., Any] | None:
        """Return a function that the run can call for `setting`, if `function` has another form of the project.

        Called when a setting of `config.user_functions.FORMS` names the function. `name` begins error messages. Raises
        UserError if the run cannot call a function of this form.
        """
        return None

    def use_router(self, url: str, key: str) -> None:
        """Called in the rollout worker before functions of users are called, with the address of the run's router.

        Requests to the router carry `key` as `Authorization: Bearer`. It is empty if the router needs none.
        """

    def load_batch(self, path: Path) -> tuple[int, list[Group]] | None:
        """Return the number of the rollout and the groups of a batch that the project saved; None for other files.

        Raises UserError if the file is one of the project, but cannot be read.
        """
        return None

    def check(self, config: RunConfig) -> None:
        """Raise UserError if the run cannot begin with this configuration. Called after users' modules are imported."""

    def begin_run(self, config: RunConfig, context: RecordingContext) -> None:
        """Called in the rollout worker before anything is generated."""

    def begin_rollout(self, rollout_id: int) -> None:
        """Called in the rollout worker before the batch `rollout_id` is collected."""


class Guests(Kind[Guest]):
    """The guests. All of them are asked, because any of them may know a file, a flag or a key."""

    def ask(self, action: str, call: Callable[[Guest], T]) -> Mapping[str, T]:
        """Return the result of `call` for each guest, by name.

        Raises UserError if a guest of a user raises any error; `action` says what the guest failed to do.
        """
        results: dict[str, T] = {}
        for name, guest in self.usable().items():
            with errors_of(guest, action):
                results[name] = call(guest)
        return results


GUESTS = Guests("guest", Guest, "miles_async.compat", by_path=False)
