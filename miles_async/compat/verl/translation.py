"""Translates verl's keys, of its files and of its command line, where Hydra reads them as `section.key=value`.

`rules.py` has the rule of each key. `data.py`, `layout.py` and `objective.py` translate keys that mean something only
together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from miles_async.compat.verl import data, layout, objective
from miles_async.compat.verl.rules import SKIP_FIELDS, TABLE, rule_below
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.schema import RunConfig
from miles_async.config.translation import Outcome, Table, Translator, entries, sets

_SECTIONS = frozenset(
    {
        *("actor_rollout_ref", "async_training", "critic", "model_engine", "ray_kwargs", "reward", "reward_model"),
        *("global_profiler", "trainer", "transfer_queue"),
    }
)
"""Sections that only verl has."""
_STEPS = (
    *(data.batch_sizes, data.lengths, data.schedule),
    *(layout.devices, layout.layout, layout.adapters, layout.micro_batches),
    *(objective.optimizer, objective.objective, objective.correction, objective.divergence, objective.group_filter),
    *(layout.engines, layout.heads, data.turns, layout.reference),
    *(data.data_and_rewards, data.evaluation, data.checkpoints, data.tracking),
)
"""What combines keys, in order: the size of a batch is needed for the length of a run, and for its schedule."""


def recognises(content: Mapping[str, Any]) -> bool:
    """Whether the content has a section that only verl has, or a key of verl in a section with one of our names.

    A file with nothing but the section `skip` means the same in both projects, and is read as ours.
    """
    own = {key for key, rule in TABLE.items() if rule != sets(key)}
    return not _SECTIONS.isdisjoint(content) or any(key in own for key, _ in entries(content, TABLE))


def has_key(key: str) -> bool:
    """Whether an override sets a key of verl. `group@section=choice` is Hydra's choice of a file for a section."""
    section = key.rpartition("@")[2].partition(".")[0]
    return key in TABLE or section in {*_SECTIONS, "hydra"} or rule_below(key) is not None


def translate(content: Mapping[str, Any]) -> Outcome:
    """What the content of a file, or the overrides of a command line by key, mean here."""
    table = {**TABLE, **_skip_roles(content.get("skip"))}
    values = dict(entries(content, table))
    table |= {key: rule for key in values if key not in table and (rule := rule_below(key)) is not None}
    translator = Translator("verl", table)
    for key, value in values.items():
        if value is None and key in table:
            translator.idle[key] = "is null, so it sets nothing"
        else:
            translator.apply(key, value)
    keys = CombinedKeys(translator, {key: value for key, value in values.items() if value is not None})
    for combine in _STEPS:
        combine(keys)
    return translator


def resolve_skip_rollout(config: RunConfig) -> RunConfig:
    """The configuration without the deprecated `skip_rollout`, which enables both skip roles at every step.

    It has no effect if a role is enabled already.
    """
    skip = config.skip
    if skip.rollout.enable or skip.async_rollout.enable:
        text = "--skip-rollout is deprecated and has no effect beside skip.rollout or skip.async_rollout: remove it"
        update: dict[str, Any] = {}
    else:
        text = "--skip-rollout is deprecated: set skip.rollout.enable or skip.async_rollout.enable, and steps, instead"
        all_steps: dict[str, Any] = {"enable": True, "steps": ["0-"]}
        roles = {"rollout": skip.rollout, "async_rollout": skip.async_rollout}
        enabled = {name: role.model_copy(update=all_steps) for name, role in roles.items()}
        update = {"skip": skip.model_copy(update=enabled)}
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    update["rollout"] = config.rollout.model_copy(update={"skip_rollout": False})
    return config.model_copy(update=update)


def _skip_roles(section: Any) -> Table:
    """The rules for a user's skip modules. Each module has a field in verl's SkipManagerConfig."""
    roles = set(section) - {"rollout", "async_rollout"} if isinstance(section, Mapping) else set()
    return {f"skip.{role}.{name}": sets(f"skip.roles.{role}.{name}") for role in roles for name in SKIP_FIELDS}
