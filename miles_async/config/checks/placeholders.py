"""Checks of paths and templates: a placeholder that is not replaced would stay in a file name or in a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from miles_async.config.fields import SETTINGS
from miles_async.config.schema import RunConfig

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
_NUMBERED = ("save_hf", "save_debug_rollout_data", "load_debug_rollout_data")
"""Paths in which `{rollout_id}` is replaced."""
_PLAIN = (
    "save",
    "load",
    "run_dir",
    "store_dir",
    "cache_dir",
    "profile_dir",
    "dump_details",
    "hf_checkpoint",
    "ref_load",
)
"""Paths in which nothing is replaced."""


def _paths(config: RunConfig) -> Iterator[str]:
    for name in (*_NUMBERED, *_PLAIN):
        path = SETTINGS[name].value(config)
        known = ("{rollout_id}",) if name in _NUMBERED else ()
        for placeholder in _PLACEHOLDER.findall(path or ""):
            if placeholder not in known:
                hint = "only {rollout_id} is replaced in it" if known else "nothing is replaced in it"
                yield f"{name} {path} has the placeholder {placeholder}, but {hint}: remove {placeholder}"


def _overwritten(config: RunConfig) -> Iterator[str]:
    learner, debug = config.learner, config.debug
    exported = learner.save_hf if learner.save_interval is not None else None
    for name, path, what in (
        ("save_hf", exported, "export"),
        ("save_debug_rollout_data", debug.save_debug_rollout_data, "batch saved"),
    ):
        if path is not None and "{rollout_id}" not in path and config.rollout.num_rollout > 1:
            yield f"every {what} to {name} {path} would overwrite the last one: add {{rollout_id}} to {name}"


def _templates(config: RunConfig) -> Iterator[str]:
    template = config.warm_start.warm_start_template
    if "{prompt}" not in template:
        yield f"warm_start_template {template!r} has no placeholder: add {{prompt}} to it"
    template = config.data.prompt_template
    if config.data.reasoning_gym_task is None:
        return
    if "{question}" not in template and "{expression}" not in template:
        yield f"prompt_template {template!r} has no placeholder: add {{question}} or {{expression}} to it"


CHECKS = (_paths, _overwritten, _templates)
