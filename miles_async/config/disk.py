"""The disk space that a run needs, estimated from its settings (docs/how-to/disk-space.md has the measurements)."""

from __future__ import annotations

from typing import NamedTuple

from miles_async.config.generation import bounds_of, schedule_of
from miles_async.config.model_shape import shape_of
from miles_async.config.schema import RunConfig
from miles_async.scheduling.bounds import Schedule

EVENT_BYTES = 170
"""Bytes of a group in the compressed parts of the event log."""
GROUP_BYTES, TOKEN_BYTES = 2000, 9
"""Bytes of a group in the run store, and further bytes per token."""
WRITES = 2
"""How often SQLite writes what is stored: to its log, and to the file."""
PARAMETER_BYTES = 14
"""Bytes of a parameter in a checkpoint: its value in 16 and in 32 bits, and two moments of Adam in 32 bits."""
OTHER_PROCESSES = 3
"""Processes that write logs besides engines and learner ranks: driver, rollout worker and router."""
LOG_FILES = 4
"""Log files of a process: `.log` and `.jsonl`, each with an older one."""


class DiskSpace(NamedTuple):
    """Bytes that a run needs at most, if every response has its full length."""

    events: int
    """The event log."""
    store: int
    """The run store: groups that are finished and not trained, or that no checkpoint covers."""
    written: int
    """What the whole run writes to the store."""
    logs: int
    checkpoint: int | None
    """One checkpoint, about; None if the size of the model is not known."""


def disk_space(config: RunConfig, entry: str) -> DiskSpace:
    """Return what a run that `entry` starts needs."""
    rollout, learner, settings = config.rollout, config.learner, config.observability
    bounds = bounds_of(config, entry)
    tokens = (rollout.rollout_max_prompt_len or 0) + rollout.rollout_max_response_len
    group = GROUP_BYTES + rollout.n_samples_per_prompt * tokens * TOKEN_BYTES
    all_groups = rollout.rollout_batch_size * rollout.num_rollout
    uncovered = rollout.rollout_batch_size * (learner.save_interval or 0) if config.restarts_learner else 0
    waiting = bounds.adapters * (
        bounds.room if schedule_of(config, entry) is Schedule.FULLY_ASYNC else bounds.generation_batch
    )
    processes = config.engine.count + learner.ranks + OTHER_PROCESSES
    return DiskSpace(
        events=min(settings.event_log_max_bytes, all_groups * EVENT_BYTES + 2 * settings.event_log_rotate_bytes),
        store=group * min(all_groups, waiting + bounds.publish_groups + uncovered),
        written=WRITES * group * all_groups,
        logs=processes * LOG_FILES * settings.log_rotate_bytes,
        checkpoint=_parameters(config) * PARAMETER_BYTES or None,
    )


def checkpoints_written(config: RunConfig) -> int:
    """Return how many checkpoints the whole run writes."""
    rollouts = config.rollout.num_rollout
    return -(-rollouts // (config.learner.save_interval or rollouts))


def _parameters(config: RunConfig) -> int:
    """Return about how many parameters the model has; 0 if its dimensions are not known."""
    if (shape := shape_of(config.model)) is None:
        return 0
    attention = 2 * shape.hidden * shape.head_width * (shape.heads + shape.query_groups)
    feed_forward = 3 * shape.hidden * shape.feed_forward * (shape.experts or 1)
    return shape.layers * (attention + feed_forward) + 2 * shape.vocabulary * shape.hidden
