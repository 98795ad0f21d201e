"""Batches that somebody else generates and posts (the seed's rollout buffer).

    --rollout-function-path miles_async.rollout.external_rollout.generate_rollout --agent-port 8800

The generator opens sessions at the endpoint, lets its agents play in them, and posts whole groups with their rewards;
`examples/external_generator.py` shows how. It goes on while a batch trains; what waits is bounded by `queue_capacity`.
"""

from __future__ import annotations

from typing import Any

import structlog

from miles_async.pipeline.source import RolloutSource
from miles_async.rollout.contract import Arguments
from miles_async.types import Group

log = structlog.get_logger(__name__)


async def generate_rollout(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """The `rollout_batch_size` groups posted longest ago, without those that grew too old; waits for more."""
    if evaluation:
        return await data_source.evaluate(rollout_id)
    groups: list[Group] = []
    while len(groups) < args.rollout_batch_size:
        group = await args.trajectories.take()
        age = data_source.live_version - group.oldest_version
        if args.max_weight_staleness is not None and age >= args.max_weight_staleness:
            # It would be one version older still when its step begins.
            log.warning("posted group is too old", group=group.feed_index, versions_behind=age)
            data_source.discard(group, "too_old")
            continue
        groups.append(group)
    return groups
