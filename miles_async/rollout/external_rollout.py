"""Batches that an external program generates and posts (slime's rollout buffer).

    --rollout-function-path miles_async.rollout.external_rollout.generate_rollout --agent-port 8800

The external generator opens sessions at the endpoint, runs its agents in them, and posts whole groups with their
rewards; `examples/external_generator.py` is an example. Its requests carry the key in `agent_key` of the run folder.
The generator continues while a batch trains; at most `queue_capacity` groups wait. Groups that were acknowledged are
not lost with the rollout worker.
"""

from __future__ import annotations

from typing import Any

import structlog

from miles_async.modes.shipped import External
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.types import Group

log = structlog.get_logger(__name__)


@External()
async def generate_rollout(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """Return the `rollout_batch_size` oldest posted groups; waits for groups, and discards those that are too stale.

    With `evaluation`, return rewards and truncation flags of the held-out data sets instead.
    """
    if evaluation:
        return await data_source.evaluate(rollout_id)
    groups: list[Group] = []
    while len(groups) < args.rollout_batch_size:
        group = await args.trajectories.take()
        age = data_source.age_of(group)
        if args.max_weight_staleness is not None and age >= args.max_weight_staleness:
            # A version may be published before the step begins, so the group must be one version below the limit.
            log.warning("posted group is too old", group=group.feed_index, versions_behind=age)
            data_source.discard(group, "too_old")
            continue
        groups.append(group)
    return groups
