"""Settings that contradict each other, or name what is not there: one sentence each, which says what to set.

Only what can be told at once and without importing anything heavy; what needs the data, the model or a user's module
is checked by whoever opens it, at start-up and in the same words.
"""

from __future__ import annotations

from miles_async.config.checks import models, rollouts, serving, sizes
from miles_async.config.checks.notes import NOTES
from miles_async.config.derived import EXTERNAL_FUNCTION, SFT_FUNCTION, bounds_of, schedule_of
from miles_async.config.schema import RunConfig
from miles_async.scheduling.bounds import Schedule


def problems(config: RunConfig, entry: str) -> list[str]:
    """Why a run of `entry` would be refused; empty where it may start."""
    schedule = schedule_of(config, entry)
    found = [sentence for check in _CHECKS for sentence in check(config)]
    path = config.rollout.rollout_function_path
    if schedule is Schedule.FULLY_ASYNC and path in (SFT_FUNCTION, EXTERNAL_FUNCTION):
        found.append(
            f"schedule fully_async has no effect on {path}, which brings its own batches: "
            "set schedule to one_step_off or synchronous"
        )
    if config.cluster.colocate and schedule is not Schedule.SYNCHRONOUS:
        found.append("colocate is for train.py: what generates while it trains needs devices of its own; unset it")
    if schedule is not Schedule.SYNCHRONOUS and config.rollout.max_weight_staleness == 0:
        found.append(
            "max_weight_staleness 0 allows no overlap of generation and training: use train.py, which takes turns, "
            "or set it to 1 or more"
        )
    elif schedule is Schedule.FULLY_ASYNC:
        found += sizes.flow(config, bounds_of(config, entry))
    return found


def notes(config: RunConfig, entry: str) -> list[str]:
    """Settings that will do nothing in this run, or something else than one may think: worth a warning."""
    return [sentence for note in NOTES for sentence in note(config, entry)]


_CHECKS = (*sizes.CHECKS, *rollouts.CHECKS, *models.CHECKS, *serving.CHECKS)
