"""Rewards as a run would give them."""

from __future__ import annotations

import asyncio
from typing import Any

from miles_async.config.schema import RunConfig
from miles_async.rewards.factory import open_rewarder
from miles_async.types import Group, Sample


def scored(*responses: str, label: Any = None, metadata: dict[str, Any] | None = None, **rollout: Any) -> list[Any]:
    """What the reward that is configured gives these responses."""
    samples = [Sample(index=i, response=text, label=label, metadata=metadata or {}) for i, text in enumerate(responses)]
    group = Group(samples, feed_index="sample_0_0")

    async def score() -> None:
        rewarder = open_rewarder(RunConfig.model_validate({"rollout": rollout}), args=None)
        try:
            await rewarder.score(group)
        finally:
            await rewarder.close()

    asyncio.run(score())
    return [sample.reward for sample in group]
