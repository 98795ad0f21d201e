"""Scores responses with the reward that the settings of a test name."""

from __future__ import annotations

from typing import Any

from miles_async.rewards.factory import RunRewards
from miles_async.types import Group, Sample
from tests.configuration import run_config


async def scored(
    *responses: str, label: Any = None, metadata: dict[str, Any] | None = None, **rollout: Any
) -> list[Any]:
    """Returns the rewards of these responses under the configured reward."""
    samples = [Sample(index=i, response=text, label=label, metadata=metadata or {}) for i, text in enumerate(responses)]
    group = Group(samples, feed_index="sample_0_0")
    rewarder = RunRewards(run_config(**rollout), args=None)
    try:
        await rewarder.score(group)
    finally:
        await rewarder.close()
    return [sample.reward for sample in group]
