"""slime's and Miles' attributes of `args`: the value of each of their flags.

A flag that sets one of our settings has the value of that setting, whichever way it was set. A flag without a
counterpart was not passed, so it is False or None, as in slime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.compat.slime.flags import EVAL_FIELDS as OF_DATASETS
from miles_async.config.fields import BY_PATH
from miles_async.config.translation import Flag, Only, Sets


def of_flags(flags: Mapping[str, Flag], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each flag by name; `settings` are the values of all settings by name."""
    return {name: _value(flag, settings) for name, flag in flags.items()}


def of_evaluation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of slime's flags for evaluations, from the data sets.

    A flag that holds for all data sets is None if they differ. `eval_config` is always None: its data sets are in
    `eval_prompt_data`, too.
    """
    datasets = settings["eval_datasets"]
    found = {}
    for flag, field in OF_DATASETS.items():
        first, *others = [getattr(dataset, field) for dataset in datasets.values()] or [None]
        found[flag] = first if all(other == first for other in others) else None
    return {
        **found,
        "eval_prompt_data": [word for name, each in datasets.items() for word in (name, each.path)] or None,
    }


def _value(flag: Flag, settings: Mapping[str, Any]) -> Any:
    is_switch = flag.takes in ("nothing", "option")
    match flag.rule:
        case Sets(settings=(dotted,), values=None):
            return _setting(dotted, settings)
        case Sets(settings=(dotted,), values=values) if values is not None:
            ours = _setting(dotted, settings)
            return next((theirs for theirs, value in values.items() if value == ours), False if is_switch else None)
        case Only(values=(value,)):
            return value
        case _:
            return False if is_switch else None


def _setting(dotted: str, settings: Mapping[str, Any]) -> Any:
    """The value of a setting, or of a key of a setting that is a dictionary; None if the key is unset."""
    path = tuple(dotted.split("."))
    if (setting := BY_PATH.get(path)) is not None:
        return settings[setting.name]
    return (settings[BY_PATH[path[:-1]].name] or {}).get(path[-1])
