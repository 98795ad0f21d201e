"""Checks of a configuration: settings that contradict each other or name missing files.

Every problem is one sentence that names the setting and suggests a value. These checks run in milliseconds and import
nothing heavy. Problems with the data, the weights or a user's module are found by the code that opens them at start-up.
"""

from __future__ import annotations

from miles_async.config import untested
from miles_async.config.checks import (
    adapters,
    layouts,
    memory,
    models,
    placeholders,
    plugins,
    rollouts,
    serving,
    sizes,
    switches,
)
from miles_async.config.checks.notes import NOTES, NOTES_ON_SCHEDULE
from miles_async.config.generation import bounds_of, rollout_mode, schedule_of, takes_from_queue
from miles_async.config.schema import RunConfig
from miles_async.errors import collected
from miles_async.scheduling.bounds import Schedule


def problems(config: RunConfig, entry: str) -> list[str]:
    """Reasons why `entry` (`train_async.py` or `train.py`) refuses to start; empty if the configuration is valid."""
    schedule = schedule_of(config, entry)
    found: list[str] = []
    for check in _CHECKS:
        # Several checks read the shape of the model, which raises UserError if that fails.
        with collected(found):
            found += check(config)
    found = list(dict.fromkeys(found))
    if schedule is Schedule.FULLY_ASYNC and not rollout_mode(config).may_be_continuous:
        path = config.rollout.rollout_function_path
        found.append(
            f"schedule fully_async has no effect on {path}, which brings its own batches: "
            "set schedule to one_step_off or synchronous"
        )
    if config.data.adapters and not takes_from_queue(config, entry):
        found.append(
            "adapters work only in a fully asynchronous run, in which each of them has a queue: start train_async.py, "
            "and set rollout_function_path to miles_async.rollout.fully_async_rollout.generate_rollout_fully_async"
        )
    if config.cluster.colocate and schedule is not Schedule.SYNCHRONOUS:
        found.append("colocate works only with train.py, where engines and learner take turns: unset colocate")
    if schedule is not Schedule.SYNCHRONOUS and config.rollout.max_weight_staleness == 0:
        found.append(
            "max_weight_staleness 0 does not allow generation and training to overlap: use train.py, which alternates "
            "between the two, or set it to 1 or more"
        )
    elif (problem := sizes.key_age_problem(config, overlaps=schedule is not Schedule.SYNCHRONOUS)) is not None:
        found.append(problem)
    elif schedule is Schedule.FULLY_ASYNC:
        if config.learner.lora_rank and config.rollout.max_weight_staleness is None:
            found.append(
                "without max_weight_staleness, engines may have to hold any number of adapters: set it, for example "
                "to 2, or set lora_rank to 0"
            )
        found += sizes.fully_async_problems(config, bounds_of(config, entry))
    return found


def notes(config: RunConfig, entry: str) -> list[str]:
    """Warnings about settings that have no effect in this run, or an effect that users may not expect."""
    on_schedule = [sentence for note in NOTES_ON_SCHEDULE for sentence in note(config, entry)]
    return [*on_schedule, *(sentence for note in NOTES for sentence in note(config))]


_MODULES = (plugins, sizes, placeholders, rollouts, models, adapters, switches, layouts, memory, serving, untested)
_CHECKS = [check for module in _MODULES for check in module.CHECKS]
