"""Translates ROLL's configuration files, which have a section for each role, such as `actor_train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_async.compat.roll import adapters, data, environments, layout, objective
from miles_async.compat.roll.table import TABLE
from miles_async.config.combined_keys import CombinedKeys
from miles_async.config.hydra import References, Unresolved
from miles_async.config.translation import Idle, Outcome, Refused, Translator, entries

_STEPS = (
    *(layout.environment, layout.devices, layout.stages, layout.batch_sizes, layout.recomputation, layout.engine),
    adapters.adapters,
    *(data.sizes, data.schedule, data.downloads, data.tracking, data.recordings, data.template, data.data_and_rewards),
    environments.environments,
    *(objective.advantages, objective.masks, objective.loss, objective.coefficients, objective.divergence),
    *(objective.correction, objective.tokens),
)
"""What combines keys, in order: sizes of the layout are needed for those of batches."""


def translate(content: Mapping[str, Any]) -> Outcome:
    """What the content of a file means here.

    `${key}` stands for the value of another key, as in OmegaConf. A key that ROLL does not know may be such a value.
    """
    translator = Translator("ROLL", TABLE)
    references = References(content)
    variables = references.names(content)
    values: dict[str, Any] = {}
    for key, value in entries(content, TABLE):
        rule = TABLE.get(key)
        if rule is None and any(name == key or name.startswith(f"{key}.") for name in variables):
            translator.idle[key] = "is a variable, which other keys refer to"
            continue
        try:
            # A value without effect may refer to anything.
            values[key] = value if isinstance(rule, Refused | Idle | None) else references.resolved(value)
        except Unresolved as error:
            translator.problems.append(f"{key} {error}")
    keys = CombinedKeys(translator, values)
    for key, value in values.items():
        translator.apply(key, value)
    for combine in _STEPS:
        combine(keys)
    return translator
