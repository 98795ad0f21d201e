"""The rollout function of fully asynchronous runs.

    python train_async.py --rollout-function-path fully_async_rollout.generate_rollout_fully_async

Naming this function selects the schedule `fully_async`: a persistent producer keeps the engines busy for the whole run
and fills a queue. The service then takes its batches directly from the queue and does not call the function. A user's
own rollout function can call it to process the groups of each batch; with the decorator `@fully_async`, that function
is fully asynchronous too.
"""

from __future__ import annotations

from typing import Any

from miles_async.modes.shipped import Stream
from miles_async.pipeline.rollout_source import RolloutSource
from miles_async.rollout.batch_rollout import generate_rollout
from miles_async.rollout.contract import Arguments


@Stream()
async def generate_rollout_fully_async(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """Return `rollout_batch_size` groups from the queue, ordered by sample index.

    Under a schedule without a stream, each call generates one batch. With `evaluation`, return rewards and truncation
    flags of the held-out data sets instead.
    """
    if evaluation or not data_source.has_stream:
        return await generate_rollout(args, rollout_id, data_source, evaluation)
    return await data_source.drain_stream(rollout_id, args.rollout_batch_size)
