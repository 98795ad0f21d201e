"""A hook that waits before the reward, as a slow grader does, so that many groups are in flight.

    --rollout-sample-hook-path benchmarks.study.slow_grader.wait

By Little's law, groups are then trained about N / P versions after their first token, with N groups in flight and
batches of P groups. Waiting costs no CPU.
"""

from __future__ import annotations

import asyncio
from typing import Any

GROUPS_PER_SECOND = 120
"""A little less than what two cores generate, so that generation does not fall behind the waits."""


async def wait(args: Any, sample: Any, evaluation: bool) -> None:
    if not evaluation:
        await asyncio.sleep(args.over_sampling_batch_size / GROUPS_PER_SECOND)
