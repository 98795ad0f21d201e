"""The fully asynchronous rollout function (seed `fully-async`).

    python train_async.py --rollout-function-path fully_async_rollout.generate_rollout_fully_async

The first call starts a background producer that keeps SGLang busy for the rest of the run; each call drains one batch.
Queue, window, admission and staleness gate live in `miles_async/pipeline/`; here is only the choice to use them so.
"""

from __future__ import annotations

from typing import Any

from miles_async.pipeline.source import RolloutSource
from miles_async.rollout.contract import Arguments


async def generate_rollout_fully_async(
    args: Arguments, rollout_id: int, data_source: RolloutSource, evaluation: bool = False
) -> Any:
    """`rollout_batch_size` groups from the queue, oldest sample first; with `evaluation`, the held-out scores."""
    if evaluation:
        return await data_source.evaluate(rollout_id)
    return await data_source.drain_stream(rollout_id, args.rollout_batch_size)
