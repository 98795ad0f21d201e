"""Checks of the plug-ins that settings name, and of the own settings of plug-ins and guests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from miles_async.config.fields import SETTINGS, Setting
from miles_async.config.schema import RunConfig
from miles_async.guests import GUESTS
from miles_async.plugins import errors_of


def _plugins(config: RunConfig) -> Iterator[str]:
    for setting in SETTINGS.values():
        if setting.plugins is not None:
            yield from _problems(setting, reduce(getattr, setting.path[:-1], config))


def _problems(setting: Setting, section: Any) -> Iterator[str]:
    assert setting.plugins is not None
    for plugin in setting.plugins.usable().values():
        if plugin.Settings is not None:
            with errors_of(plugin, "check its settings"):
                yield from list(plugin.problems(section))
    name = getattr(section, setting.path[-1])
    if name is None:
        return
    own = setting.plugins.find(name).Settings
    if own is not None and not isinstance(section, own):
        yield (
            f"{setting.name} {name} has settings, which only a plug-in of an installed package adds to the "
            f"flags: install it with an entry point in the group {setting.plugins.group!r}"
        )


def _guests(config: RunConfig) -> Iterator[str]:
    for guest in GUESTS.usable().values():
        with errors_of(guest, "check its settings"):
            yield from list(guest.problems(config.rollout))


CHECKS = (_plugins, _guests)
