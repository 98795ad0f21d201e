"""How the batches of a run are generated: what follows from the mode of its rollout function (`miles_async/modes`).

To find the mode of a shipped function, nothing is imported. For any other function, its module is imported.
"""

from __future__ import annotations

from contextlib import suppress

from miles_async.config.fields import values_of
from miles_async.config.schema import RunConfig
from miles_async.config.user_functions import install_guests, load_function
from miles_async.errors import UserError
from miles_async.modes.mode import MODES, RolloutMode, Undeclared, mode_of
from miles_async.modes.shipped import Saved
from miles_async.scheduling.adapters import AdapterVersions
from miles_async.scheduling.bounds import Bounds, Schedule

_modes: dict[str, RolloutMode] = {}
"""The modes of users' functions that were looked for, by path. No module is imported a second time."""


def rollout_mode(config: RunConfig) -> RolloutMode:
    """The mode of a run's rollout function. A function that cannot be imported, which is refused later, counts as
    undeclared."""
    path = config.rollout.rollout_function_path
    if trains_only(config):
        return Saved()
    if (shipped := _shipped(path)) is not None:
        return shipped
    if path not in _modes:
        _modes[path] = _of_user(config)
    return _modes[path]


def _shipped(path: str) -> RolloutMode | None:
    """The mode of the shipped rollout function at `path`; None for other paths."""
    return next((mode for mode in MODES.shipped.values() if mode.function == path), None)


def _of_user(config: RunConfig) -> RolloutMode:
    path = config.rollout.rollout_function_path
    for mode in MODES.usable().values():
        if mode.function == path:
            return mode
    with suppress(UserError):
        install_guests(values_of(config))
        return mode_of(load_function(path, setting="rollout_function_path"))
    return Undeclared()


def trains_only(config: RunConfig) -> bool:
    """Whether the run trains on saved batches instead of generating."""
    return config.debug.debug_train_only or config.debug.load_debug_rollout_data is not None


def evaluates(config: RunConfig) -> bool:
    """Whether the run evaluates: on held-out problems, on `eval_datasets`, or with a user-defined function."""
    rollout = config.rollout
    held_out = config.data.eval_size or any(dataset.eval_size for dataset in config.data.datasets.values())
    return bool(held_out or rollout.eval_datasets or rollout.eval_function_path)


def generates(config: RunConfig) -> bool:
    """Whether the run needs engines: to generate its batches, or only to evaluate."""
    return rollout_mode(config).needs_engines or (not trains_only(config) and evaluates(config))


def generates_by_user(config: RunConfig) -> bool:
    """Whether a function of the user generates samples. It may choose sampling parameters, tools and rewards itself."""
    rollout = config.rollout
    return rollout.custom_generate_function_path is not None or _shipped(rollout.rollout_function_path) is None


def serves_agents(config: RunConfig) -> bool:
    """Whether the run has an endpoint for agents: generate functions and external generators may use it."""
    return config.rollout.custom_generate_function_path is not None or rollout_mode(config).takes_posted_groups


def takes_from_queue(config: RunConfig, entry: str) -> bool:
    """Whether batches come directly from the queue: fully asynchronous runs with a rollout function of this project."""
    mode = _shipped(config.rollout.rollout_function_path)
    return mode is not None and mode.collects_only and schedule_of(config, entry) is Schedule.FULLY_ASYNC


def schedule_of(config: RunConfig, entry: str) -> Schedule:
    """The schedule of a run: the setting `schedule`, else the one that entry script and rollout function imply.

    `entry` is `train_async.py` or `train.py`. Under `train_async.py`, the mode of the rollout function decides. A run
    that trains on saved batches is always synchronous.
    """
    setting = config.rollout.schedule
    if setting is not None and not trains_only(config):
        return Schedule(setting)
    return Schedule.SYNCHRONOUS if entry == "train.py" else rollout_mode(config).schedule


def reason_of_schedule(config: RunConfig, entry: str) -> str:
    """Why the run has its schedule, in a few words."""
    if trains_only(config):
        return "the run trains on saved batches"
    if config.rollout.schedule is not None:
        return f"{entry} with --schedule"
    return entry if entry == "train.py" else f"{entry}; the rollout function {rollout_mode(config).summary}"


def adapter_versions_of(config: RunConfig) -> AdapterVersions | None:
    """The versions of the adapter that engines hold; None if the run trains no adapter.

    Where generation and training take turns, no group is more than one version old.
    """
    if not config.learner.lora_rank:
        return None
    limit = config.rollout.max_weight_staleness
    return AdapterVersions(
        1 if limit is None else limit,
        config.data.adapter_weights,
        moves_between_turns=config.weights.lora_newest_each_turn,
    )


def bounds_of(config: RunConfig, entry: str) -> Bounds:
    """Window, slots and staleness bound of a run started by `entry`."""
    rollout = config.rollout
    return Bounds.derive(
        rollout_batch_size=rollout.rollout_batch_size,
        over_sampling_batch_size=rollout.over_sampling_batch_size,
        windowed_fifo_ratio=rollout.windowed_fifo_ratio if rollout_mode(config).uses_window else None,
        max_weight_staleness=rollout.max_weight_staleness,
        max_kv_staleness=config.weights.max_kv_staleness,
        update_weights_interval=config.weights.update_weights_interval,
        queue_capacity=rollout.queue_capacity,
        schedule=schedule_of(config, entry),
        adapters=max(1, len(config.data.adapters)),
    )
