"""The disk space that a run needs, estimated from its settings (docs/how-to/disk-space.md has the measurements)."""

from __future__ import annotations

from typing import NamedTuple

from miles_async.config.generation import adapter_versions_of, bounds_of, schedule_of
from miles_async.config.memory import adapter_elements
from miles_async.config.model_shape import shape_of
from miles_async.config.schema import RunConfig
from miles_async.models.layers import Split
from miles_async.scheduling.bounds import Schedule

EVENT_BYTES = 170
"""Bytes of a group in the compressed parts of the event log."""
GROUP_BYTES, TOKEN_BYTES = 2000, 9
"""Bytes of a group in the run store, and further bytes per token."""
WRITES = 2
"""How often SQLite writes what is stored: to its log, and to the file."""
PARAMETER_BYTES = 14
"""Bytes of a parameter in a checkpoint: its value in 16 and in 32 bits, and two moments of Adam in 32 bits."""
ADAPTER_BYTES = 4
"""Bytes of an element of an adapter in the folder of a version, in 32 bits."""
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
    adapters: int
    """The versions of adapters that engines may load; 0 without adapters, or if the model is not known."""
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
    versions = adapter_versions_of(config)
    processes = config.engine.count + learner.ranks + OTHER_PROCESSES
    return DiskSpace(
        events=min(settings.event_log_max_bytes, all_groups * EVENT_BYTES + 2 * settings.event_log_rotate_bytes),
        store=group * min(all_groups, waiting + bounds.publish_groups + uncovered),
        written=WRITES * group * all_groups,
        logs=processes * LOG_FILES * settings.log_rotate_bytes,
        adapters=0
        if versions is None
        else versions.capacity * ADAPTER_BYTES * (adapter_elements(config, in_files=True) or 0),
        checkpoint=_trained_parameters(config) * PARAMETER_BYTES or None,
    )


def checkpoints_written(config: RunConfig) -> int:
    """Return how many checkpoints the whole run writes."""
    rollouts = config.rollout.num_rollout
    return -(-rollouts // (config.learner.save_interval or rollouts))


def _trained_parameters(config: RunConfig) -> int:
    """Return about how many parameters a checkpoint has; 0 if the dimensions of the model are not known."""
    if config.learner.lora_rank:
        return len(config.data.adapter_weights) * (adapter_elements(config) or 0)
    shape = shape_of(config.model)
    return 0 if shape is None else shape.weights(Split()).total
