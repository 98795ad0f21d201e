"""All kinds of plug-ins, and the settings that plug-ins add to the sections of the schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from miles_async.environments import ENVIRONMENTS
from miles_async.guests import GUESTS
from miles_async.losses.advantages.estimator import ADVANTAGES
from miles_async.losses.corrections.correction import CORRECTIONS
from miles_async.losses.objectives.objective import OBJECTIVES
from miles_async.models.plugin import MODELS
from miles_async.modes.mode import MODES
from miles_async.plugins import Kind, is_extended
from miles_async.rewards.plugin import REWARDS
from miles_async.section import Section
from miles_async.transports import TRANSPORTS
from miles_async.wire_formats import FORMATS

S = TypeVar("S", bound=Section)

KINDS: Sequence[Kind[Any]] = (
    MODELS,
    MODES,
    OBJECTIVES,
    CORRECTIONS,
    ADVANTAGES,
    REWARDS,
    TRANSPORTS,
    FORMATS,
    ENVIRONMENTS,
    GUESTS,
)
"""All kinds of plug-ins but token columns, which import NumPy."""


class PluginSettings:
    """Adds the settings of plug-ins to sections. A plug-in whose setting clashes with another one cannot be used."""

    def __init__(self, *sections: type[Section]) -> None:
        """`sections` are all sections of the schema, as they are without plug-ins."""
        self._owners = {
            section.flag_prefix + name: "miles_async"
            for section in sections
            for name, field in section.model_fields.items()
            if field.annotation not in sections
        }
        self._added: set[type[Section]] = set()

    def added_to(self, section: type[S], *kinds: Kind[Any]) -> type[S]:
        """The section with the settings of all plug-ins of these kinds."""
        # Plug-ins that derive from each other may have the same settings.
        added = list(dict.fromkeys(settings for kind in kinds for settings in self._of_kind(kind)))
        # The package of the schema exports the class, and pickle looks for it there.
        content = {"__module__": section.__module__.rpartition(".")[0], "__doc__": section.__doc__}
        # The first base has the last fields, so the section's own settings come first in `--help`.
        return type(section.__name__, (*reversed(added), section), content) if added else section

    def _of_kind(self, kind: Kind[Any]) -> Iterator[type[Section]]:
        for name, plugin in kind.usable().items():
            if plugin.Settings is None:
                continue
            if plugin.Settings not in self._added:
                owner, settings = kind.origin(name), plugin.Settings.model_fields.keys()
                if taken := sorted(settings & self._owners.keys()):
                    clash = f"declares the setting {taken[0]}, which {self._owners[taken[0]]} has too: rename it"
                    kind.refuse(name, f"{owner} {clash}")
                    continue
                self._owners |= dict.fromkeys(settings, owner)
                self._added.add(plugin.Settings)
            yield plugin.Settings


def plugin_problems() -> Iterator[str]:
    """One sentence for each plug-in of an installed package that cannot be used, or that is slow to import."""
    for kind in KINDS:
        yield from kind.problems()
    if is_extended("miles_async.columns"):
        # Columns import NumPy, which no command needs that only reads settings.
        from miles_async.columns.column import COLUMNS

        yield from COLUMNS.problems()
