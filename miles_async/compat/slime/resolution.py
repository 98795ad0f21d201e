"""Settings whose values are names of slime or Miles."""

from __future__ import annotations

import importlib.util

from miles_async.config.fields import SETTINGS, with_settings
from miles_async.config.generation import rollout_mode
from miles_async.config.schema import RunConfig

_SHIPPED = {
    "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn": (
        "miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
    ),
    "miles.rollout.inference_rollout.inference_rollout_common.InferenceRolloutFn": (
        "miles_async.rollout.sglang_rollout.generate_rollout"
    ),
} | {
    f"{project}.rollout.{function}": f"miles_async.rollout.{function}"
    for project in ("slime", "miles")
    for function in (
        "sglang_rollout.generate_rollout",
        "sft_rollout.generate_rollout",
        "fully_async_rollout.generate_rollout_fully_async",
    )
}
"""Rollout functions of slime and Miles, and those of this project that do the same."""
_OWN_SOURCES = [
    f"{project}.rollout.data_source.{name}"
    for project in ("slime", "miles")
    for name in ("RolloutDataSource", "RolloutDataSourceWithBuffer")
]
"""Data sources of slime and Miles that read the data of the run, as the run itself does."""


_MISMATCH = "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
"""The end of the path of a function in the examples of slime and Miles."""


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with functions of this project in place of slime's, and with slime's names if they are used."""
    path = config.rollout.rollout_function_path
    if path in _SHIPPED:
        config = with_settings(config, rollout_function_path=_SHIPPED[path])
    if config.rollout.eval_function_path in _SHIPPED:
        config = with_settings(config, eval_function_path=None)
    if config.data.data_source_path in _OWN_SOURCES:
        config = with_settings(config, data_source_path=None)
    if (config.algorithm.custom_tis_function_path or "").endswith(_MISMATCH):
        own = "miles_async.compat.slime.mismatch.compute_mis_weights_with_cp"
        config = with_settings(config, custom_tis_function_path=own)
    context = config.rollout.custom_args.get("rollout_max_context_len")
    if isinstance(context, int) and config.rollout.rollout_max_prompt_len is None:
        # slime leaves out prompts without room for a token of a response.
        config = with_settings(config, rollout_max_prompt_len=max(1, context - 1))
    if config.debug.debug_train_only and config.debug.load_debug_rollout_data is None:
        # slime's scripts for supervised training turn the engines off in this way, so nothing can be evaluated.
        supervised = with_settings(config, debug_train_only=False, eval_size=0)
        config = config if rollout_mode(supervised).needs_engines else supervised
    if any(_names(project, config) and importlib.util.find_spec(project) is None for project in ("slime", "miles")):
        config = with_settings(config, slime_imports=True)
    return config


def _names(project: str, config: RunConfig) -> bool:
    """Whether a setting names a function of a package of this project."""
    values = (setting.value(config) for name, setting in SETTINGS.items() if name.endswith("_path"))
    return any(isinstance(value, str) and value.startswith(f"{project}.") for value in values)
